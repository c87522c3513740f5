//! The dashboard's files, and the limits for the browsers that show it.
//!
//! **Problem.** A browser acts for every page that it shows. A page of a stranger may send orders
//! to an address that only this browser reaches, such as a forwarded socket, or read there under a
//! name of its own (DNS rebinding).
//!
//! **Idea.** The files hold no data of the host, so they are served without the token; everything
//! that they show comes from the API, under its rules. On TCP each request carries the token, which
//! no other page has. On the unix socket a browser may only read, and only under the name
//! `localhost` or an address ([`admit`]).

use axum::{
    extract::Request,
    http::{
        HeaderMap, HeaderValue, Method,
        header::{
            ACCEPT_LANGUAGE, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, ORIGIN,
            REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
        },
    },
    middleware::Next,
    response::{IntoResponse, Response},
};

use super::problem::Problem;

/// Path and content of each built file.
const FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/dashboard_files.rs"));

/// The page of a program that was built without the files.
const NOT_BUILT: &str = "<!doctype html><html lang=\"en\"><title>Overbook</title>\
    <h1>This program was built without its dashboard</h1>\
    <p>Run <code>make build</code> in the source tree: it builds the dashboard (with Node.js), and \
    then the program. The API is complete without it: \
    <a href=\"/v1/openapi.json\">/v1/openapi.json</a>.</p></html>";

/// Nothing comes from elsewhere, and no script stands in the page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The file that a request asks for. `None`: it asks for something else.
pub(super) fn file(request: &Request) -> Option<Response> {
    let path = request.uri().path();
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return None;
    }
    match FILES.iter().find(|(name, _)| *name == path) {
        Some((_, content)) => Some(answer(path, content)),
        None if path == "/" && FILES.is_empty() => Some(answer(path, NOT_BUILT.as_bytes())),
        None => None,
    }
}

fn answer(path: &str, content: &'static [u8]) -> Response {
    let kind = match path.rsplit_once('.') {
        Some((_, "js")) => "text/javascript; charset=utf-8",
        Some((_, "css")) => "text/css; charset=utf-8",
        Some((_, "svg")) => "image/svg+xml",
        Some((_, "md")) => "text/plain; charset=utf-8",
        _ => "text/html; charset=utf-8",
    };
    // Names of assets change with their content.
    let is_asset = path.starts_with("/assets/");
    let keep = if is_asset { "public, max-age=31536000, immutable" } else { "no-cache" };
    let headers = [
        (CONTENT_TYPE, kind),
        (CACHE_CONTROL, keep),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
    ];
    (headers, content).into_response()
}

/// Serves the dashboard's files, and passes on all other requests.
pub(super) async fn serve(request: Request, next: Next) -> Response {
    match file(&request) {
        Some(response) => response,
        None => next.run(request).await,
    }
}

/// Refuses a browser's orders, and its requests under another host's name.
pub(super) async fn admit(request: Request, next: Next) -> Response {
    let reads = matches!(*request.method(), Method::GET | Method::HEAD);
    if is_of_a_browser(request.headers()) && !(reads && is_local(request.headers().get(HOST))) {
        return Problem::OfABrowser.into_response();
    }
    next.run(request).await
}

/// A page can change the values of these headers, but cannot leave them all out.
fn is_of_a_browser(headers: &HeaderMap) -> bool {
    headers.contains_key(ORIGIN)
        || headers.contains_key(ACCEPT_LANGUAGE)
        || headers.contains_key("sec-fetch-site")
}

/// Whether the name is `localhost` or an address: no stranger can give a host these names.
fn is_local(host: Option<&HeaderValue>) -> bool {
    let Some(host) = host.and_then(|host| host.to_str().ok()) else { return false };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || address.parse::<std::net::IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_no_stranger_can_take_are_local() {
        let local = |name: &str| is_local(Some(&HeaderValue::from_str(name).unwrap()));
        for name in ["localhost", "localhost:8080", "127.0.0.1:8080", "[::1]:8080", "10.0.0.1"] {
            assert!(local(name), "{name}");
        }
        for name in ["", "evil.example", "evil.example:8080", "localhost.evil.example", "::x"] {
            assert!(!local(name), "{name}");
        }
        assert!(!is_local(None));
    }

    #[test]
    fn a_browser_is_known_by_any_of_its_headers() {
        let of = |name: &'static str| {
            let value = HeaderValue::from_static("x");
            is_of_a_browser(&[(name.parse().unwrap(), value)].into_iter().collect())
        };
        assert!(of("origin") && of("accept-language") && of("sec-fetch-site"));
        assert!(!of("user-agent") && !of("host"));
    }
}
