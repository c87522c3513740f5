//! The two text formats of metrics, and the choice between them.
//!
//! Every tool reads [Prometheus' text format][text]. Prometheus itself asks for [OpenMetrics][om],
//! which also has units and an end mark, so a truncated page is noticed. A counter's family is
//! called `x_total` in the first format, and `x` in the second.
//!
//! [text]: https://prometheus.io/docs/instrumenting/exposition_formats/
//! [om]: https://prometheus.io/docs/specs/om/open_metrics_spec/

use std::fmt::Write;

use axum::http::{HeaderMap, header::ACCEPT};

/// Units that a metric's name may end with.
const UNITS: [&str; 3] = ["bytes", "seconds", "ratio"];
const OPEN_METRICS: &str = "application/openmetrics-text";
const TEXT: &str = "text/plain";

/// A text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextFormat {
    /// Prometheus' own format, version 0.0.4.
    Prometheus,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl TextFormat {
    /// The format that the header `Accept` prefers: OpenMetrics only where it is named.
    pub(super) fn accepted(headers: &HeaderMap) -> Self {
        let accepts = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let ranges: Vec<(String, f32)> =
            accepts.flat_map(|value| value.split(',')).map(range).collect();
        let quality = |kind: &str| {
            let of_kind = ranges.iter().filter(|(name, _)| name == kind);
            of_kind.map(|(_, quality)| *quality).fold(0.0, f32::max)
        };
        let open = quality(OPEN_METRICS);
        if open > 0.0 && open >= quality(TEXT) { Self::OpenMetrics } else { Self::Prometheus }
    }

    /// The header `Content-Type`.
    pub(super) const fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// A media range and its quality (RFC 9110 §12.4.2); a faulty quality excludes the range.
fn range(text: &str) -> (String, f32) {
    let mut parts = text.split(';').map(str::trim);
    let name = parts.next().unwrap_or_default().to_ascii_lowercase();
    let quality = parts.find_map(|part| part.strip_prefix("q=").or(part.strip_prefix("Q=")));
    (name, quality.map_or(1.0, |quality| quality.parse().unwrap_or(0.0)))
}

/// Labels with their values.
pub(super) type Labels<'a> = Vec<(&'static str, &'a str)>;
/// The samples of one metric.
pub(super) type Samples<'a> = Vec<(Labels<'a>, f64)>;

/// Writes metric families one after the other.
pub(super) struct MetricsWriter {
    format: TextFormat,
    text: String,
}

impl MetricsWriter {
    /// An empty page.
    pub(super) const fn new(format: TextFormat) -> Self {
        Self { format, text: String::new() }
    }

    /// The page.
    pub(super) fn finish(mut self) -> String {
        if self.format == TextFormat::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.text
    }

    /// A gauge with one sample and no labels.
    pub(super) fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.gauges(name, help, vec![(Vec::new(), value)]);
    }

    /// A gauge.
    pub(super) fn gauges(&mut self, name: &str, help: &str, samples: Samples<'_>) {
        self.family([name, help], "gauge", name, samples);
    }

    /// A counter; its name ends with `_total`.
    pub(super) fn counters(&mut self, name: &str, help: &str, samples: Samples<'_>) {
        let family = match self.format {
            TextFormat::Prometheus => name,
            TextFormat::OpenMetrics => name.strip_suffix("_total").unwrap_or(name),
        };
        self.family([family, help], "counter", name, samples);
    }

    fn family(&mut self, [family, help]: [&str; 2], kind: &str, name: &str, samples: Samples<'_>) {
        let text = &mut self.text;
        let unit = UNITS
            .into_iter()
            .find(|unit| family.strip_suffix(unit).is_some_and(|rest| rest.ends_with('_')));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# HELP overbook_{family} {help}");
        let _ = writeln!(text, "# TYPE overbook_{family} {kind}");
        if let Some(unit) = unit.filter(|_| self.format == TextFormat::OpenMetrics) {
            let _ = writeln!(text, "# UNIT overbook_{family} {unit}");
        }
        for (labels, value) in samples {
            let _ = write!(text, "overbook_{name}");
            for (at, (label, value)) in labels.iter().enumerate() {
                let open = if at == 0 { '{' } else { ',' };
                let _ = write!(text, "{open}{label}=\"{}\"", escaped(value));
            }
            let close = if labels.is_empty() { "" } else { "}" };
            let _ = writeln!(text, "{close} {}", number(value));
        }
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn number(value: f64) -> String {
    if value.is_infinite() {
        return if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned();
    }
    value.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted(accept: &str) -> TextFormat {
        TextFormat::accepted(&[(ACCEPT, accept.parse().unwrap())].into_iter().collect())
    }

    #[test]
    fn open_metrics_is_for_clients_that_prefer_it() {
        for accept in [
            // Prometheus 2.42 and 3.
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.5",
            "Application/OpenMetrics-Text",
            "text/plain, application/openmetrics-text",
        ] {
            assert_eq!(accepted(accept), TextFormat::OpenMetrics, "{accept}");
        }
        for accept in [
            "*/*",
            "text/plain",
            "text/html,application/xhtml+xml,*/*;q=0.8",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text;q=x",
            "application/openmetrics-text;q=0.3, text/plain;q=0.5",
            "",
        ] {
            assert_eq!(accepted(accept), TextFormat::Prometheus, "{accept}");
        }
        assert_eq!(TextFormat::accepted(&HeaderMap::new()), TextFormat::Prometheus);
    }

    fn page(format: TextFormat) -> String {
        let mut page = MetricsWriter::new(format);
        page.gauge("used_bytes", "Memory.", 1.5);
        let labels = vec![("vm", "a\"\\\n"), ("group", "")];
        page.counters("cpu_seconds_total", "Time.", vec![(labels, f64::INFINITY)]);
        page.finish()
    }

    #[test]
    fn a_counters_family_and_the_units_differ_between_the_formats() {
        let sample = r#"overbook_cpu_seconds_total{vm="a\"\\\n",group=""} +Inf"#;
        let text = "\
# HELP overbook_used_bytes Memory.
# TYPE overbook_used_bytes gauge
overbook_used_bytes 1.5
# HELP overbook_cpu_seconds_total Time.
# TYPE overbook_cpu_seconds_total counter
";
        assert_eq!(page(TextFormat::Prometheus), format!("{text}{sample}\n"));
        let open = "\
# HELP overbook_used_bytes Memory.
# TYPE overbook_used_bytes gauge
# UNIT overbook_used_bytes bytes
overbook_used_bytes 1.5
# HELP overbook_cpu_seconds Time.
# TYPE overbook_cpu_seconds counter
# UNIT overbook_cpu_seconds seconds
";
        assert_eq!(page(TextFormat::OpenMetrics), format!("{open}{sample}\n# EOF\n"));
    }
}
