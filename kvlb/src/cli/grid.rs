//! A table that fits its screen.

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{ContentArrangement, Table};

use super::table::Screen;

/// A column, and how well the reader can do without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Column {
    title: &'static str,
    /// 0: always shown. Where the screen is narrow, the highest goes first.
    spare: u8,
}

/// A column that is always shown.
pub(super) const fn keep(title: &'static str) -> Column {
    Column { title, spare: 0 }
}

/// A column that may be left out; of several the one with the highest `rank` first.
pub(super) const fn spare(title: &'static str, rank: u8) -> Column {
    Column { title, spare: rank }
}

/// Rows under columns.
#[derive(Debug)]
pub(super) struct Grid {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

impl Grid {
    pub(super) fn new(columns: &[Column]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// A grid whose columns are all shown, wrapped where they must be.
    pub(super) fn of(titles: &[&'static str]) -> Self {
        Self { columns: titles.iter().map(|title| keep(title)).collect(), rows: Vec::new() }
    }

    pub(super) fn add(&mut self, row: impl Into<Vec<String>>) {
        self.rows.push(row.into());
    }

    /// The grid in loxicmd's style. On a screen that is too narrow, spare columns are left out and named below; only then
    /// are cells wrapped.
    pub(super) fn render(&self, screen: Screen) -> String {
        let shown = self.shown(screen);
        let pick = |row: &[String]| -> Vec<String> {
            shown.iter().map(|i| row.get(*i).cloned().unwrap_or_default()).collect()
        };
        let mut table = Table::new();
        table.load_style(ASCII_MARKDOWN).set_content_arrangement(ContentArrangement::Dynamic).force_no_tty();
        if let Some(columns) = screen.columns {
            table.set_width(columns);
        }
        table.set_header(shown.iter().map(|i| self.columns[*i].title.to_uppercase()));
        table.add_rows(self.rows.iter().map(|row| pick(row)));
        let hidden: Vec<_> =
            (0..self.columns.len()).filter(|i| !shown.contains(i)).map(|i| self.columns[i].title).collect();
        if hidden.is_empty() {
            return format!("{table}\n");
        }
        format!("{table}\n(no room for {}; a wider terminal or -o json shows them)\n", hidden.join(", "))
    }

    /// Positions of the columns that fit, in order.
    fn shown(&self, screen: Screen) -> Vec<usize> {
        let mut shown: Vec<usize> = (0..self.columns.len()).collect();
        let Some(room) = screen.columns else { return shown };
        while self.width(&shown) > usize::from(room) {
            let spare = |i: &usize| (self.columns[*i].spare, *i);
            match shown.iter().copied().max_by_key(spare) {
                Some(last) if self.columns[last].spare > 0 => shown.retain(|i| *i != last),
                _ => break,
            }
        }
        self.refill(&mut shown, usize::from(room));
        shown
    }

    /// Brings back what was left out for the sake of a wider column, and has room after all.
    fn refill(&self, shown: &mut Vec<usize>, room: usize) {
        let mut hidden: Vec<usize> = (0..self.columns.len()).filter(|i| !shown.contains(i)).collect();
        hidden.sort_by_key(|i| self.columns[*i].spare);
        for i in hidden {
            if self.width(shown) + self.cell_width(i) + 3 <= room {
                shown.push(i);
            }
        }
        shown.sort_unstable();
    }

    /// Columns of a line: a bar and a space on either side of each cell, and the last bar.
    fn width(&self, shown: &[usize]) -> usize {
        shown.iter().map(|i| self.cell_width(*i) + 3).sum::<usize>() + 1
    }

    fn cell_width(&self, i: usize) -> usize {
        let cells = self.rows.iter().filter_map(|row| row.get(i)).flat_map(|cell| cell.lines());
        cells.chain([self.columns[i].title]).map(|line| line.chars().count()).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid() -> Grid {
        let mut grid = Grid::new(&[keep("Id"), spare("Name", 1), spare("Mark", 2), keep("State")]);
        grid.add(["1", "chat", "0", "active"].map(str::to_owned));
        grid
    }

    #[test]
    fn the_most_spare_column_goes_first_and_is_named() {
        let render = |columns| grid().render(Screen { columns });
        assert_eq!(
            render(None),
            "| ID | NAME | MARK | STATE  |\n|----|------|------|--------|\n| 1  | chat | 0    | active |\n"
        );
        assert_eq!(render(Some(29)), render(None));
        assert!(render(Some(28)).starts_with("| ID | NAME | STATE  |\n"));
        assert!(render(Some(28)).ends_with("(no room for Mark; a wider terminal or -o json shows them)\n"));
        assert!(render(Some(20)).contains("no room for Name, Mark;"));
        let mut wide_name = grid();
        wide_name.add(["2", "a name that is long", "0", "active"].map(str::to_owned));
        let text = wide_name.render(Screen { columns: Some(30) });
        assert!(text.starts_with("| ID | MARK | STATE  |\n"), "Mark has room once Name is gone: {text}");
    }

    #[test]
    fn what_is_always_shown_is_wrapped_at_last() {
        let text = grid().render(Screen { columns: Some(12) });
        assert!(text.lines().take(3).all(|line| line.chars().count() <= 12), "{text}");
        assert!(text.contains("| 1"));
    }
}
