//! Where an engine is, as an operator writes it.

use reqwest::Url;

use crate::fleet::EndpointKey;

/// Why a text is no engine's place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// TLS.
    #[error("{0:?} is https; engines are spoken to in plain http only: name the port at which the engine serves it")]
    Tls(String),
    /// Anything else.
    #[error("{0:?} is no engine's address; write http://HOST:PORT or HOST:PORT")]
    Odd(String),
}

/// Reads `http://HOST:PORT`, with or without the scheme and a final `/v1`.
///
/// # Errors
/// [`PlaceError`] where it means something else.
pub fn place(text: &str) -> Result<EndpointKey, PlaceError> {
    let odd = || PlaceError::Odd(text.to_owned());
    let text = text.trim();
    let whole = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let url = Url::parse(&whole).map_err(|_error| odd())?;
    match url.scheme() {
        "http" => {}
        "https" => return Err(PlaceError::Tls(text.to_owned())),
        _ => return Err(odd()),
    }
    let plain = matches!(url.path(), "" | "/" | "/v1" | "/v1/") && url.query().is_none() && url.fragment().is_none();
    if !plain || !url.username().is_empty() || url.password().is_some() {
        return Err(odd());
    }
    let host = url.host_str().filter(|host| !host.is_empty()).ok_or_else(odd)?;
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let port = url.port_or_known_default().filter(|port| *port != 0).ok_or_else(odd)?;
    Ok(EndpointKey { host, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_url_or_a_host_with_its_port() {
        let shown = |text| place(text).map(|place| place.to_string());
        for (text, expected) in [
            ("http://127.0.0.1:8000", "127.0.0.1:8000"),
            ("http://127.0.0.1:8000/", "127.0.0.1:8000"),
            ("http://engine-1.pool:8000/v1", "engine-1.pool:8000"),
            ("engine:8000", "engine:8000"),
            ("10.0.0.1:8000", "10.0.0.1:8000"),
            ("[::1]:8000", "[::1]:8000"),
            ("http://[2001:db8::1]:8000", "[2001:db8::1]:8000"),
            ("http://engine", "engine:80"),
        ] {
            assert_eq!(shown(text).as_deref(), Ok(expected), "{text}");
        }
        assert_eq!(place("https://engine:8443"), Err(PlaceError::Tls("https://engine:8443".to_owned())));
        for odd in
            ["", "http://", "ftp://x:1", "http://x:8000/health", "http://u:p@x:1", "x:0", "x:99999", "http://x?a=b"]
        {
            assert!(matches!(place(odd), Err(PlaceError::Odd(_))), "{odd}");
        }
    }
}
