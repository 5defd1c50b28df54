//! `kvlb save` and `kvlb apply`.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::Path;

use serde_json::{Value, json};

use super::api::Api;
use super::{Answer, CliError};

/// Loxicmd's file name.
const FILE: &str = "lbconfig.txt";
/// Loxicmd's ending for the file that was there.
const BACKUP: &str = "lbconfig.txt.bk";

/// Writes all rules to a file in `dir`, in the API's own form without what only the API writes.
pub(super) async fn save(api: &Api, dir: &Path) -> Result<Answer, CliError> {
    let mut all = api.get(&["config", "loadbalancer", "all"], &[]).await?;
    let mut count = 0;
    for rule in all["lbAttr"].as_array_mut().into_iter().flatten() {
        count += 1;
        strip(rule);
    }
    let path = dir.join(FILE);
    write_file(dir, &format!("{all:#}\n"))
        .map_err(|error| CliError::Failed(format!("write {}: {error}; see --config-path", path.display())))?;
    Ok(format!("Success: {count} rules saved to {}\n", path.display()).into())
}

fn strip(rule: &mut Value) {
    let Value::Object(members) = rule else { return };
    for name in ["id", "kvBlend", "notes", "refused", "fc_effective"] {
        members.shift_remove(name);
    }
    for endpoint in members.get_mut("endpoints").and_then(Value::as_array_mut).into_iter().flatten() {
        let Value::Object(members) = endpoint else { continue };
        for name in ["ep_idx", "state", "counter", "kvStatus", "telemetry"] {
            members.shift_remove(name);
        }
    }
}

/// The new file takes the old one's place in one step, in the directory that was asked for.
fn write_file(dir: &Path, text: &str) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let (path, next) = (dir.join(FILE), dir.join(format!("{FILE}.tmp")));
    let mut file = File::create(&next)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    if path.exists() {
        fs::copy(&path, dir.join(BACKUP))?;
    }
    fs::rename(next, path)
}

/// Creates every rule of a file; the first refusal decides the exit code, the others are still tried.
pub(super) async fn apply(api: &Api, file: &Path) -> Result<Answer, CliError> {
    let bytes = read_input(file)?;
    let parsed: Value = serde_json::from_slice(&bytes)
        .map_err(|error| CliError::Argument(format!("{} is not JSON: {error}", file.display())))?;
    let bodies = match parsed {
        Value::Array(bodies) => bodies,
        Value::Object(mut members) => match members.shift_remove("lbAttr") {
            Some(Value::Array(bodies)) => bodies,
            Some(_) => return Err(CliError::Argument(format!("{}: lbAttr is not a list", file.display()))),
            None => vec![Value::Object(members)],
        },
        _ => return Err(CliError::Argument(format!("{} holds no rules", file.display()))),
    };
    let (mut text, mut code, mut failed) = (String::new(), 0, 0);
    for body in &bodies {
        match api.post(&["config", "loadbalancer"], &[], body).await {
            Ok(answer) => text.push_str(&super::success(&answer, None)),
            Err(error) => {
                failed += 1;
                code = if code == 0 { error.exit_code() } else { code };
                text.extend([format!("refused: {}: {error}\n", named(body))]);
            }
        }
    }
    if failed > 0 {
        text.extend([format!("{failed} of {} rules were refused\n", bodies.len())]);
    }
    Ok(Answer { text, code })
}

/// How a rule of a file is told from the others.
fn named(body: &Value) -> String {
    let service = &body["serviceArguments"];
    json!([service["externalIP"], service["port"], service["model_name"]]).to_string()
}

/// A file, or standard input for `-`.
pub(super) fn read_input(file: &Path) -> Result<Vec<u8>, CliError> {
    let mut bytes = Vec::new();
    let read = if file == Path::new("-") {
        io::stdin().lock().read_to_end(&mut bytes).map(drop)
    } else {
        File::open(file).and_then(|mut file| file.read_to_end(&mut bytes).map(drop))
    };
    read.map_err(|error| CliError::Argument(format!("read {}: {error}", file.display())))?;
    Ok(bytes)
}
