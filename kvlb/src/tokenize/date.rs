//! The time of day that some templates write into the prompt.

use std::fmt::Write as _;

/// The wall clock's time at the engine, which is what `strftime_now` of a chat template prints.
///
/// The engine prints its own local time. Containers run on UTC unless told otherwise; where an engine does not, whoever
/// makes this value has to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WallTime {
    seconds: i64,
}

const DAY: i64 = 86_400;
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

impl WallTime {
    /// The local time that is `seconds` after 1970-01-01 00:00:00 of the same clock.
    pub const fn from_seconds(seconds: i64) -> Self {
        Self { seconds }
    }

    /// Seconds since 1970-01-01 00:00:00 of the same clock.
    pub const fn seconds(self) -> i64 {
        self.seconds
    }

    /// Days since 1970-01-01 of the same clock.
    pub(super) const fn day(self) -> i64 {
        self.seconds.div_euclid(DAY)
    }

    /// The time as C's `strftime` writes it in the C locale; `None` for a conversion that is not known here.
    pub(crate) fn format(self, format: &str) -> Option<String> {
        let (year, month, day) = self.civil();
        let second = self.seconds.rem_euclid(DAY);
        let weekday = WEEKDAYS[usize::try_from(self.seconds.div_euclid(DAY).rem_euclid(7)).unwrap_or(0)];
        let month_name = MONTHS[usize::try_from(month - 1).unwrap_or(0)];
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(char) = chars.next() {
            if char != '%' {
                out.push(char);
                continue;
            }
            // Writing to a string cannot fail.
            match chars.next()? {
                'Y' => write!(out, "{year}"),
                'm' => write!(out, "{month:02}"),
                'd' => write!(out, "{day:02}"),
                'y' => write!(out, "{:02}", year.rem_euclid(100)),
                'B' => write!(out, "{month_name}"),
                'b' => write!(out, "{}", &month_name[..3]),
                'A' => write!(out, "{weekday}"),
                'a' => write!(out, "{}", &weekday[..3]),
                'H' => write!(out, "{:02}", second / 3600),
                'M' => write!(out, "{:02}", second / 60 % 60),
                'S' => write!(out, "{:02}", second % 60),
                '%' => write!(out, "%"),
                _ => return None,
            }
            .ok()?;
        }
        Some(out)
    }

    /// Year, month and day of the Gregorian calendar.
    ///
    /// Years are counted from March on, so that the leap day comes last; 400 of them are 146,097 days.
    fn civil(self) -> (i64, i64, i64) {
        const DAYS_TO_1970: i64 = 719_468; // from 0000-03-01
        const DAYS_PER_ERA: i64 = 146_097;
        let days = self.seconds.div_euclid(DAY) + DAYS_TO_1970;
        let day_of_era = days.rem_euclid(DAYS_PER_ERA);
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / (DAYS_PER_ERA - 1)) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = year_of_era + 400 * days.div_euclid(DAYS_PER_ERA) + i64::from(month <= 2);
        (year, month, day)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What GNU date prints for the same seconds, in UTC.
    #[test]
    fn dates_are_written_as_c_writes_them() {
        let cases = [
            (0, "1970-01-01 00:00:00 Thu Thursday Jan January 70"),
            (951_782_399, "2000-02-28 23:59:59 Mon Monday Feb February 00"),
            (951_782_400, "2000-02-29 00:00:00 Tue Tuesday Feb February 00"),
            (1_709_210_096, "2024-02-29 12:34:56 Thu Thursday Feb February 24"),
            (1_796_000_000, "2026-11-30 00:53:20 Mon Monday Nov November 26"),
            (4_102_444_799, "2099-12-31 23:59:59 Thu Thursday Dec December 99"),
        ];
        for (seconds, expected) in cases {
            let written = WallTime::from_seconds(seconds).format("%Y-%m-%d %H:%M:%S %a %A %b %B %y");
            assert_eq!(written.as_deref(), Some(expected));
        }
        assert_eq!(WallTime::from_seconds(0).format("100%%").as_deref(), Some("100%"));
        assert_eq!(WallTime::from_seconds(0).format("%c"), None);
        assert_eq!(WallTime::from_seconds(0).format("%"), None);
    }
}
