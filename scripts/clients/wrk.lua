-- For with_wrk.py: posts completions (or gets the models), looks into every answer, and ends with a line of JSON.

local threads = {}

function setup(thread)
  table.insert(threads, thread)
end

function init()
  wrong, sent = 0, 0
  posting = wrk.path == "/v1/completions"
  wanted = posting and '"finish_reason":"length"' or '"object":"list"'
  wrk.headers["Content-Type"] = "application/json"
end

function request()
  if not posting then
    return wrk.format("GET")
  end
  sent = sent + 1
  local body = '{"model": "tiny", "max_tokens": 2, "temperature": 0, "prompt": "request %d of a storm"}'
  return wrk.format("POST", nil, nil, body:format(sent % 10))
end

function response(status, _, body)
  if status ~= 200 or not body:find(wanted, 1, true) then
    wrong = wrong + 1
  end
end

function done(summary)
  local wrong_in_all = 0
  for _, thread in ipairs(threads) do
    wrong_in_all = wrong_in_all + thread:get("wrong")
  end
  local errors = summary.errors
  local line = '{"requests": %d, "wrong": %d, "errors": {"connect": %d, "read": %d, "write": %d, "status": %d, "timeout": %d}}\n'
  io.write(line:format(
    summary.requests, wrong_in_all, errors.connect, errors.read, errors.write, errors.status, errors.timeout))
end
