-- wrk: POST the requests of the file that REQUESTS names, in turn, and print figures as JSON.
-- Each request is a line "<bytes of headers> <bytes of body>", the headers ("Name: value" a line), and the body.
local requests = {}
local file = assert(io.open(os.getenv("REQUESTS"), "rb"))
for line in function() return file:read("*l") end do
  local head, body = line:match("(%d+) (%d+)")
  local headers = {}
  for name, value in file:read(tonumber(head)):gmatch("([^:\n]+): ([^\n]+)") do
    headers[name] = value
  end
  requests[#requests + 1] = {headers = headers, body = file:read(tonumber(body))}
end
file:close()

if #requests == 1 then
  wrk.method, wrk.headers, wrk.body = "POST", requests[1].headers, requests[1].body
else
  local at, texts = 0, {}
  init = function()
    for index, each in ipairs(requests) do
      texts[index] = wrk.format("POST", nil, each.headers, each.body)
    end
  end
  request = function()
    at = at % #texts + 1
    return texts[at]
  end
end

done = function(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '\n{"requests": %d, "seconds": %f, "p50_ms": %f, "p99_ms": %f, "failed": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout
  ))
end
