//! Tests of the client with servers that do not behave like QEMU.

use std::time::Instant;

use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixListener;

use super::*;

const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": []}}"#;

/// The scripted server's next step.
#[derive(Clone)]
enum ScriptStep {
    /// Sends this text, end of line included.
    Say(String),
    /// Waits for one line.
    Hear,
    /// Pauses.
    Wait(Duration),
}
use ScriptStep::{Hear, Say, Wait};

fn say(line: &str) -> ScriptStep {
    Say(format!("{line}\n"))
}

/// Sends the greeting and accepts `qmp_capabilities`.
fn hello() -> Vec<ScriptStep> {
    vec![say(GREETING), Hear, say(r#"{"return": {}, "id": 1}"#)]
}

/// Connects to a server that follows `script` and then closes the connection.
async fn connect(script: Vec<ScriptStep>) -> Result<QmpClient, QmpError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = BufReader::new(stream);
        for step in script {
            match step {
                Say(text) => drop(stream.get_mut().write_all(text.as_bytes()).await),
                Hear => drop(stream.read_line(&mut String::new()).await),
                Wait(time) => tokio::time::sleep(time).await,
            }
        }
    });
    QmpClient::connect(&path).await
}

async fn connect_then(script: &[ScriptStep]) -> QmpClient {
    connect([hello(), script.to_vec()].concat()).await.unwrap()
}

async fn refused(script: Vec<ScriptStep>) -> String {
    connect(script).await.unwrap_err().to_string()
}

#[tokio::test]
async fn a_socket_that_is_not_qmp_is_named_by_its_first_line() {
    let text = refused(vec![say("220 mail.example ESMTP")]).await;
    assert_eq!(text, "not QMP: first line was `220 mail.example ESMTP`");
    let text = refused(vec![Say("SSH-2.0-x".into())]).await;
    assert_eq!(text, "not QMP: first line was `SSH-2.0-x`");
}

#[tokio::test]
async fn silence_suggests_another_client() {
    let started = Instant::now();
    let text = refused(vec![Wait(Duration::from_secs(120))]).await;
    assert!(text.starts_with("no QMP greeting in 2 s") && text.contains("another one"), "{text}");
    assert!(started.elapsed() < Duration::from_secs(60), "it did not wait for the end of it");
}

#[tokio::test]
async fn a_gigantic_greeting_is_cut_off() {
    let text = refused(vec![Say("x".repeat(3 * super::super::MAX_LINE))]).await;
    assert!(text.starts_with("not QMP: first line was `xxx"), "{text}");
    assert!(text.len() < 120);
}

#[tokio::test]
async fn a_gigantic_answer_cuts_the_connection() {
    let giant = format!(r#"{{"return": "{}""#, "x".repeat(3 * super::super::MAX_LINE));
    let mut client = connect_then(&[Hear, Say(giant)]).await;
    let error = client.execute(Command::new("query-balloon")).await.unwrap_err();
    assert!(matches!(error, QmpError::TooLong { .. }) && error.is_fatal(), "{error}");
}

#[tokio::test]
async fn nobody_listening_is_a_dead_socket() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(QmpClient::connect(&path).await.unwrap_err().is_dead_socket());
    std::fs::remove_file(&path).unwrap();
    assert!(QmpClient::connect(&path).await.unwrap_err().is_dead_socket());
}

#[tokio::test]
async fn death_in_the_middle_of_a_command_is_told() {
    let mut client = connect_then(&[Hear, Say(r#"{"retu"#.into())]).await;
    let error = client.execute(Command::new("query-balloon")).await.unwrap_err();
    assert!(matches!(error, QmpError::Closed), "{error}");
}

#[tokio::test]
async fn events_between_question_and_answer_are_kept_apart() {
    let event = r#"{"event": "BALLOON_CHANGE", "data": {"actual": 7}, "timestamp": {}}"#;
    let answer = r#"{"return": {"actual": 9}, "id": 2}"#;
    let mut client = connect_then(&[Hear, say(event), say(answer), Wait(DEADLINE)]).await;
    let value = client.execute(Command::new("query-balloon")).await.unwrap();
    assert_eq!(value, json!({"actual": 9}));
    assert_eq!(client.balloon_change().await.unwrap(), Bytes(7));
}

#[tokio::test]
async fn of_many_events_the_latest_balloon_is_kept_and_a_flood_ends_the_connection() {
    let event =
        |size| say(&format!(r#"{{"event": "BALLOON_CHANGE", "data": {{"actual": {size}}}}}"#));
    let few = [vec![Hear], (0..100).map(event).collect(), vec![say(r#"{"return": 1, "id": 2}"#)]];
    let mut client = connect_then(&[few.concat(), vec![Wait(DEADLINE)]].concat()).await;
    client.execute(Command::new("query-balloon")).await.unwrap();
    assert_eq!(client.balloon_change().await.unwrap(), Bytes(99));

    let flood: Vec<ScriptStep> = (0..1_000).map(event).collect();
    let mut client = connect_then(&flood).await;
    let error = loop {
        match client.balloon_change().await {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(error, QmpError::Flood) && error.is_fatal(), "{error}");
}

#[tokio::test]
async fn only_what_may_be_large_may_be_longer_than_a_line() {
    let large = "x".repeat(2 * super::super::MAX_LINE);
    let answer = say(&format!(r#"{{"return": "{large}", "id": 2}}"#));
    let script = [Hear, answer, Wait(DEADLINE)];
    let mut client = connect_then(&script).await;
    let value = client.execute(Command::new("query-memdev")).await.unwrap();
    assert_eq!(value.as_str().map(str::len), Some(large.len()));
    let mut client = connect_then(&script).await;
    let error = client.execute(Command::new("query-status")).await.unwrap_err();
    assert!(matches!(error, QmpError::TooLong { .. }), "{error}");
}

#[tokio::test]
async fn an_answer_to_another_question_is_garbage() {
    for id in ["7", "1", "-1", "\"x\"", "null"] {
        let answer = format!(r#"{{"return": {{}}, "id": {id}}}"#);
        let mut client = connect_then(&[Hear, say(&answer), Wait(DEADLINE)]).await;
        let error = client.execute(Command::new("query-balloon")).await.unwrap_err();
        assert!(matches!(error, QmpError::Garbage(_)), "{id}: {error}");
    }
}

#[tokio::test]
async fn a_refusal_is_in_qemus_words_and_harms_nothing() {
    let no = r#"{"id": 2, "error": {"class": "GenericError", "desc": "No balloon\u001b device"}}"#;
    let yes = r#"{"return": 5, "id": 3}"#;
    let mut client = connect_then(&[Hear, say(no), Hear, say(yes), Wait(DEADLINE)]).await;
    let error = client.execute(Command::new("query-balloon")).await.unwrap_err();
    assert_eq!(error.to_string(), "query-balloon: No balloon device");
    assert!(!error.is_fatal());
    assert_eq!(client.execute(Command::new("query-status")).await.unwrap(), json!(5));
}

#[tokio::test]
async fn a_late_answer_is_dropped_and_the_next_question_gets_its_own() {
    let late =
        [Hear, Wait(DEADLINE + Duration::from_millis(100)), say(r#"{"return": 1, "id": 2}"#)];
    let next = [Hear, say(r#"{"return": 2, "id": 3}"#), Wait(DEADLINE)];
    let mut client = connect_then(&[&late[..], &next[..]].concat()).await;
    let error = client.execute(Command::new("query-balloon")).await.unwrap_err();
    assert_eq!(error.to_string(), "no answer to query-balloon in 2 s");
    assert!(!error.is_fatal());
    assert_eq!(client.execute(Command::new("query-status")).await.unwrap(), json!(2));
}

#[tokio::test]
async fn in_a_batch_each_command_has_its_own_outcome() {
    let answers = "{\"return\": 1, \"id\": 2}\n{\"error\": {\"desc\": \"no\"}, \"id\": 3}\n";
    let mut client = connect_then(&[Hear, Hear, Say(answers.into()), Wait(DEADLINE)]).await;
    let commands = [Command::new("query-balloon"), Command::new("query-migrate")];
    let [balloon, migrate] = client.batch(commands).await.unwrap();
    assert_eq!(balloon.unwrap(), json!(1));
    assert_eq!(migrate.unwrap_err().to_string(), "query-migrate: no");
}

#[tokio::test]
async fn a_queue_that_is_full_is_another_clients_doing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    // As in QEMU: one client is served, one waits.
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let mut others = Vec::new();
    let error = loop {
        assert!(others.len() < 8, "the queue never fills");
        match tokio::net::UnixStream::connect(&path).await {
            Ok(stream) => others.push(stream),
            Err(_) => break QmpClient::connect(&path).await.unwrap_err(),
        }
    };
    assert!(matches!(error, QmpError::Queue), "{error}");
    assert!(error.to_string().contains("another one is connected"), "{error}");
}
