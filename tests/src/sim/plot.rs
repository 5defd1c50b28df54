//! Pictures of figures, as SVG that reads on light and on dark pages.

use std::fmt::Write as _;

use super::figures::float;
use super::report::Figures;

/// Text and lines: a grey that stands out from white and from black.
const INK: &str = "#7d8590";
/// kvlb's bars.
const OURS: &str = "#2f81f7";
/// Everybody else's.
const THEIRS: &str = "#8c959f";
/// Lines, told apart by people who see few colours too.
const LINES: [&str; 8] = ["#2f81f7", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c959f", "#b8a900"];

const ROW: f64 = 20.0;
const LEFT: f64 = 130.0;
const PANEL: f64 = 230.0;
const GAP: f64 = 80.0;

/// Bars of hits and of the time to the first token, for one workload; `is_ours` tells kvlb's policies.
pub(super) fn bars(rows: &[Figures], is_ours: impl Fn(&str) -> bool) -> String {
    let (workload, fault) = rows.first().map_or(("", ""), |row| (row.workload.as_str(), row.fault.as_str()));
    let title = if fault == "none" { workload.to_owned() } else { format!("{workload}, {fault}") };
    let height = 64.0 + ROW * float(rows.len());
    let mut svg = head(LEFT + 2.0 * PANEL + GAP + 60.0, height, &title);
    let right = LEFT + PANEL + GAP;
    text(&mut svg, LEFT, 42.0, "start", "prompt tokens found in caches, %");
    text(&mut svg, right, 42.0, "start", "TTFT p50 to p99, ms (bar: p90), logarithmic");
    let times = || rows.iter().flat_map(|row| [row.ttft_p50, row.ttft_p90, row.ttft_p99]).filter(|time| *time > 0.0);
    let (low, high) = (times().fold(f64::INFINITY, f64::min) / 1.5, times().fold(1.0, f64::max) * 1.1);
    let along = |time: f64| PANEL * (time.max(low) / low).ln() / (high / low).max(1.001).ln();
    for (number, row) in rows.iter().enumerate() {
        let y = 52.0 + ROW * float(number);
        let (colour, middle) = (if is_ours(&row.policy) { OURS } else { THEIRS }, y + ROW * 0.65);
        text(&mut svg, LEFT - 8.0, middle, "end", &row.policy);
        rect(&mut svg, LEFT, y, PANEL * row.hit / 100.0, colour);
        text(&mut svg, LEFT + PANEL * row.hit / 100.0 + 4.0, middle, "start", &format!("{:.1}", row.hit));
        rect(&mut svg, right, y, along(row.ttft_p90), colour);
        let [from, to] = [row.ttft_p50, row.ttft_p99].map(|time| right + along(time));
        line(&mut svg, from, y + ROW * 0.4, to, y + ROW * 0.4);
        text(&mut svg, right + along(row.ttft_p99.max(row.ttft_p90)) + 4.0, middle, "start", &said(row.ttft_p90));
    }
    let ceiling = LEFT + PANEL * rows.first().map_or(0.0, |row| row.ceiling) / 100.0;
    line(&mut svg, ceiling, 48.0, ceiling, height - 10.0);
    svg.push_str("</svg>\n");
    svg
}

/// The 90th percentile of the time to the first token over the stages of one workload; nothing where it has none.
pub(super) fn lines(rows: &[Figures]) -> Option<String> {
    const HIGH: f64 = 260.0;
    const WIDE: f64 = 420.0;
    let first = rows.first().filter(|row| row.stages.len() > 1)?;
    let mut svg = head(LEFT + WIDE + 180.0, HIGH + 100.0, &format!("{}: TTFT p90 in ms, logarithmic", first.workload));
    let times = || rows.iter().flat_map(|row| &row.stages).map(|stage| stage.ttft_p90).filter(|time| *time > 0.0);
    let (low, high) = (times().fold(f64::INFINITY, f64::min) / 1.3, times().fold(1.0, f64::max) * 1.2);
    let up = |time: f64| 50.0 + HIGH * (1.0 - (time.max(low) / low).ln() / (high / low).max(1.001).ln());
    let along = |at: usize| 70.0 + WIDE * float(at) / float(first.stages.len() - 1);
    let mut mark = 10_f64.powf(low.log10().ceil());
    while mark < high {
        text(&mut svg, 62.0, up(mark) + 4.0, "end", &said(mark));
        let _written = write!(
            svg,
            "<line x1=\"70\" y1=\"{0:.1}\" x2=\"{1:.1}\" y2=\"{0:.1}\" stroke=\"{INK}\" stroke-opacity=\"0.25\"/>",
            up(mark),
            70.0 + WIDE
        );
        mark *= 10.0;
    }
    for (at, stage) in first.stages.iter().enumerate() {
        text(&mut svg, along(at), HIGH + 68.0, "middle", &stage.label);
    }
    text(&mut svg, 70.0 + WIDE / 2.0, HIGH + 88.0, "middle", "requests a second");
    for (number, row) in rows.iter().enumerate() {
        let colour = LINES[number % LINES.len()];
        let dashes = if number < LINES.len() { "none" } else { "5 3" };
        let points: Vec<String> = row
            .stages
            .iter()
            .enumerate()
            .map(|(at, stage)| format!("{:.1},{:.1}", along(at), up(stage.ttft_p90)))
            .collect();
        let _written = write!(
            svg,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dashes}\" points=\"{}\"/>",
            points.join(" ")
        );
        let (x, y) = (70.0 + WIDE + 16.0, 60.0 + 18.0 * float(number));
        let _written = write!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{0:.1}\" x2=\"{1:.1}\" y2=\"{0:.1}\" stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dashes}\"/>",
            y - 4.0,
            x + 22.0
        );
        text(&mut svg, x + 28.0, y, "start", &row.policy);
    }
    svg.push_str("</svg>\n");
    Some(svg)
}

fn head(width: f64, height: f64, title: &str) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" font-family=\"sans-serif\" font-size=\"12\">"
    );
    let _written = write!(
        svg,
        "<title>{title}</title><text x=\"10\" y=\"20\" font-size=\"14\" font-weight=\"bold\" fill=\"{INK}\">{title}</text>"
    );
    svg
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, what: &str) {
    let _written = write!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{INK}\">{what}</text>");
}

fn rect(svg: &mut String, x: f64, y: f64, width: f64, colour: &str) {
    let height = ROW * 0.8;
    let _written = write!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{height:.1}\" fill=\"{colour}\" fill-opacity=\"0.8\"/>",
        width.max(0.5)
    );
}

fn line(svg: &mut String, x1: f64, y1: f64, x2: f64, y2: f64) {
    let _written = write!(
        svg,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{INK}\" stroke-width=\"1.5\"/>"
    );
}

/// A time as people read it.
fn said(millis: f64) -> String {
    if millis >= 10_000.0 { format!("{:.0} s", millis / 1e3) } else { format!("{millis:.0}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::report::StageFigures;

    #[test]
    fn pictures_name_their_axes_and_rows() {
        let stage =
            |label: &str, ttft_p90| StageFigures { label: label.to_owned(), ttft_p90, ..StageFigures::default() };
        let row = Figures {
            workload: "groups".to_owned(),
            fault: "none".to_owned(),
            policy: "hard".to_owned(),
            hit: 80.0,
            ttft_p50: 10.0,
            ttft_p90: 90.0,
            ttft_p99: 900.0,
            stages: vec![stage("3", 10.0), stage("60", 20_000.0)],
            ..Figures::default()
        };
        let bars = bars(std::slice::from_ref(&row), |_| true);
        let lines = lines(&[row]).unwrap();
        for svg in [&bars, &lines] {
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && svg.contains(">hard<"), "{svg}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
        assert!(bars.contains(">80.0<") && lines.contains("requests a second") && lines.contains(">10 s<"));
    }
}
