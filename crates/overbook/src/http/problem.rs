//! Errors of the API: a status and one sentence, always as `{"error": …}`.

use api::wire::Failure;
use axum::{
    Json,
    http::{StatusCode, header::WWW_AUTHENTICATE},
    response::{IntoResponse, Response},
};

use super::places::Crowded;

/// Number of names listed when a name is unknown.
const SUGGESTIONS: usize = 8;

/// A request that cannot be answered.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Problem {
    /// A path that is not served.
    #[error("nothing is served at `{0}`; the paths are listed at /v1/openapi.json")]
    NoSuchPath(String),
    /// A path that is served, but not with this method.
    #[error("`{path}` does not answer to {method}")]
    WrongMethod {
        /// The method used.
        method: String,
        /// The path.
        path: String,
    },
    /// A VM or group that does not exist.
    #[error("no {kind} is named `{name}`; {known}")]
    Unknown {
        /// `VM` or `group`.
        kind: &'static str,
        /// The name asked for.
        name: String,
        /// The names that are known.
        known: String,
    },
    /// A VM that is not tracked, or not long enough yet.
    #[error("`{vm}` has no miss-ratio curve: {why}")]
    NoCurve {
        /// The VM.
        vm: String,
        /// The reason.
        why: String,
    },
    /// The capacity is not known.
    #[error("how many VMs fit is not known: {0}")]
    NoCapacity(String),
    /// The host is in no pool.
    #[error("this host is in no pool; the table [pool] of its configuration would name one")]
    NoPool,
    /// A parameter that cannot be read.
    #[error("{0}")]
    BadParameter(String),
    /// No token, or a wrong one.
    #[error(
        "this needs the header `Authorization: Bearer TOKEN` with the token of `api.token_file`"
    )]
    Unauthorized,
    /// A browser's order on the unix socket, or its request under another host's name.
    #[error(
        "a browser may only read here, and only as `localhost`; for orders open the address of \
         `api.tcp`, with the token"
    )]
    OfABrowser,
    /// The token of clients that only read, with a request that may change something.
    #[error(
        "the token of `api.read_token_file` changes nothing; use the token of `api.token_file`"
    )]
    ReadOnly,
    /// Other clients have all places.
    #[error("{0}")]
    Crowded(Crowded),
    /// The loop does not answer in time.
    #[error("the daemon is too busy to answer within {0} s; nothing is known of the outcome")]
    Busy(u64),
    /// The loop refused or failed.
    #[error("{0}")]
    Failed(String),
}

impl Problem {
    /// An error for a name that is not among `known`.
    pub(super) fn unknown<'a>(
        kind: &'static str,
        name: &str,
        known: impl ExactSizeIterator<Item = &'a str>,
    ) -> Self {
        let more = known.len().saturating_sub(SUGGESTIONS);
        let names: Vec<&str> = known.take(SUGGESTIONS).collect();
        let known = match (names.is_empty(), more) {
            (true, _) => "none is known".to_owned(),
            (false, 0) => format!("known: {}", names.join(", ")),
            (false, more) => format!("known: {} and {more} more", names.join(", ")),
        };
        Self::Unknown { kind, name: name.to_owned(), known }
    }

    const fn status(&self) -> StatusCode {
        match self {
            Self::NoSuchPath(_)
            | Self::Unknown { .. }
            | Self::NoCurve { .. }
            | Self::NoCapacity(_)
            | Self::NoPool => StatusCode::NOT_FOUND,
            Self::WrongMethod { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::BadParameter(_) => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::OfABrowser | Self::ReadOnly => StatusCode::FORBIDDEN,
            Self::Busy(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::Crowded(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let answer = (self.status(), Json(Failure { error: self.to_string() }));
        match self {
            Self::Unauthorized => ([(WWW_AUTHENTICATE, "Bearer")], answer).into_response(),
            _ => answer.into_response(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_comes_with_a_few_known_ones() {
        let names: Vec<String> = (0..10).map(|n| format!("vm{n}")).collect();
        let problem = Problem::unknown("VM", "x", names.iter().map(String::as_str));
        let expected =
            "no VM is named `x`; known: vm0, vm1, vm2, vm3, vm4, vm5, vm6, vm7 and 2 more";
        assert_eq!(problem.to_string(), expected);
        let problem = Problem::unknown("VM", "x", std::iter::empty());
        assert_eq!(problem.to_string(), "no VM is named `x`; none is known");
    }
}
