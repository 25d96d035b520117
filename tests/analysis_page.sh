#!/usr/bin/env bash
# Opens a page of `birkhoff analyse` in a browser. Fails if the page makes a request, writes to the
# browser's console, or does not draw all of its pictures.
#   tests/analysis_page.sh [BUILD]     BUILD: default build/cpu. Needs chromium
set -euo pipefail
cd "$(dirname "$0")/.."

stop() { printf 'analysis_page: %s\n' "$*" >&2; exit 1; }
birkhoff=$PWD/${1:-build/cpu}/birkhoff
browser=$(command -v chromium || command -v chromium-browser) || stop "needs chromium"
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
cp CONTRIBUTING.md "$place/text.md"
cd "$place"

cat >config.txtpb <<'END'
task { language_model {} }
data { corpus: "corpus" sequence_length: 256 }
model {
  layers: 2
  channels: 64
  heads: 4
  attention {
    group { heads: 2 mechanism { sinkhorn { block: 16 } } }
    group { mechanism { routing { clusters: 8 } } }
  }
}
train { steps: 20 global_batch: 4 schedule { warmup_steps: 5 } }
END
"$birkhoff" prepare --out corpus --tokenizer bytes text.md
"$birkhoff" train config.txtpb --run run
"$birkhoff" analyse run --text text.md --html page.html

# PAGE NAME: the page as drawn to NAME.dom, what it says to NAME.log and its requests to NAME.net.
# The browser's own requests have no origin. The proxy's port is closed: no request leaves.
open_page() {
  "$browser" --headless --no-sandbox --disable-gpu --user-data-dir="$place/profile-$2" \
    --disable-background-networking --disable-component-update --no-first-run \
    --proxy-server=127.0.0.1:9 --enable-logging=stderr --log-net-log="$place/net.json" \
    --virtual-time-budget=5000 --dump-dom "file://$place/$1" >"$2.dom" 2>"$2.all"
  grep CONSOLE "$2.all" >"$2.log" || true
  grep -oE '"initiator":"[^"]*"' net.json | grep -v '"not an origin"' >"$2.net" || true
}
# A page with a request and a message, to see that they would be found.
echo '<img src="http://127.0.0.1:9/x.png"><script>console.log("x")</script>' >control.html
open_page control.html control
[ -s control.log ] && [ -s control.net ] || stop "the browser does not report requests and messages"

open_page page.html page
pictures=$(grep -o '<canvas ' page.html | wc -l)
grep -q "data-drawn=\"$pictures\"" page.dom || stop "not all of $pictures pictures are drawn"
[ ! -s page.log ] || stop "the page writes to the console: $(head -1 page.log)"
[ ! -s page.net ] || stop "the page makes $(wc -l <page.net) requests"
echo "page: tried $pictures pictures, lost 0"
