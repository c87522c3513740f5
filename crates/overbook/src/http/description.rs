//! The part of the OpenAPI description that holds for many paths: the token, and the errors that
//! stand before or around the handlers.
//!
//! An error that only one handler gives is described at that handler ([`routes`](super::routes)).

use utoipa::openapi::{
    Content, HeaderBuilder, OpenApi, Ref, Response, ResponseBuilder,
    path::Operation,
    schema::{ComponentsBuilder, ObjectBuilder, Type},
    security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme},
};

/// Name of the security scheme.
const TOKEN: &str = "token";

/// Adds what the paths have in common.
pub(super) fn complete(description: &mut OpenApi) {
    let mut bearer = Http::new(HttpAuthScheme::Bearer);
    bearer.description = Some(
        "TCP only. The token of `api.token_file` opens everything; the token of \
         `api.read_token_file` opens everything that changes nothing."
            .to_owned(),
    );
    let components = description.components.take().unwrap_or_default();
    let components = ComponentsBuilder::from(components)
        .security_scheme(TOKEN, SecurityScheme::Http(bearer))
        .build();
    description.components = Some(components);
    // The unix socket needs no token: the permissions of its file decide.
    let none: [&str; 0] = [];
    let without = SecurityRequirement::default();
    description.security = Some(vec![without, SecurityRequirement::new(TOKEN, none)]);
    for item in description.paths.paths.values_mut() {
        for operation in [&mut item.get, &mut item.post].into_iter().flatten() {
            add(operation, "401", with_header("no token, or a wrong one", "WWW-Authenticate"));
            add(operation, "405", with_header("another method than described here", "Allow"));
            add(operation, "503", failure("too many connections"));
            if operation.parameters.as_ref().is_some_and(|parameters| !parameters.is_empty()) {
                add(operation, "400", failure("a parameter that is unknown or cannot be read"));
            }
        }
        if let Some(operation) = &mut item.post {
            add(operation, "403", failure("a token that only reads"));
        }
    }
}

/// Adds an answer, unless the handler describes it itself.
fn add(operation: &mut Operation, status: &str, answer: Response) {
    operation.responses.responses.entry(status.to_owned()).or_insert_with(|| answer.into());
}

fn failure(description: &str) -> Response {
    let content = Content::new(Some(Ref::from_schema_name("Failure")));
    ResponseBuilder::new().description(description).content("application/json", content).build()
}

fn with_header(description: &str, header: &str) -> Response {
    let text = ObjectBuilder::new().schema_type(Type::String).build();
    let mut answer = failure(description);
    let header_text = HeaderBuilder::new().schema(Some(text)).build();
    answer.headers.insert(header.to_owned(), header_text.into());
    answer
}
