"""Pages that `--html` writes, in a headless Chromium: what they show, and that nothing but their own script runs.

    RESHARD=build/release/reshard python tests/interop/test_html.py [-k PATTERN]
"""
import base64
import csv
import importlib.util
import json
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESHARD = os.environ.get("RESHARD", str(ROOT / "build/release/reshard"))
SAMPLES = ROOT / "samples/checkpoints"
CHROMIUM = shutil.which("chromium")

HOSTILE = ["</script><script>document.title='ran'</script>", "<img src=x onerror=\"document.title='ran'\">",
           "<!--<script>", "javascript:alert(1)", "\u202egnp.thgiew", "{{data}}", "layers.<b>0</b>.weight"]


class Browser:
    """One tab of a headless Chromium, spoken to over a pipe."""

    def __init__(self, directory):
        here, there = os.pipe(), os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                   "--remote-debugging-pipe", "--hide-scrollbars", f"--user-data-dir={directory}/profile"]
        self.process = subprocess.Popen(["bash", "-c", f'exec "$@" 3<&{here[0]} 4>&{there[1]}', "bash", CHROMIUM, *options],
                                        pass_fds=(here[0], there[1]), stderr=subprocess.DEVNULL)
        os.close(here[0])
        os.close(there[1])
        self.writes, self.reads = here[1], there[0]
        self.left, self.number, self.session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(domain + ".enable")

    def close(self):
        os.close(self.writes)
        os.close(self.reads)
        self.process.kill()
        self.process.wait()

    def message(self):
        while b"\0" not in self.left:
            data = os.read(self.reads, 1 << 20)
            if not data:
                raise RuntimeError("chromium ended")
            self.left += data
        text, self.left = self.left.split(b"\0", 1)
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def call(self, method, **params):
        self.number += 1
        request = {"id": self.number, "method": method, "params": params}
        if self.session:
            request["sessionId"] = self.session
        text = json.dumps(request).encode() + b"\0"
        while text:
            text = text[os.write(self.writes, text):]
        while (answer := self.message()).get("id") != self.number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, path, width=1280, dark=False, scripts=True, media=""):
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=pathlib.Path(path).as_uri())
        while not any(e["method"] == "Page.loadEventFired" for e in self.events):
            self.message()
        if scripts:
            self.settle()

    def settle(self):
        """Until drawings are drawn."""
        self("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(done))))")

    def __call__(self, script):
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def text(self, selector="main"):
        return self(f"document.querySelector({json.dumps(selector)})?.innerText")

    def texts(self, selector):
        return self(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)")

    def press(self, selector, *keys):
        self(f"document.querySelector({json.dumps(selector)}).focus()")
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def complaints(self):
        return [e["params"] for e in self.events
                if e["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")]

    def screenshot(self, path):
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        pathlib.Path(path).write_bytes(base64.b64decode(image))


def write_safetensors(path, names):
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * len(names)))


@unittest.skipUnless(CHROMIUM, "chromium is not installed")
class HtmlPages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        cls.browser = Browser(cls.directory.name)
        cls.long_path = pathlib.Path(cls.directory.name, "a_name_without_spaces_" * 5)
        cls.long_path.symlink_to(SAMPLES / "pp2_tp4/checkpoint")

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        cls.directory.cleanup()

    def page(self, *arguments, code=0, **how):
        """The browser with the page of a command; without a word of complaint, and no wider than its window."""
        path = pathlib.Path(self.directory.name) / "page.html"
        done = subprocess.run([RESHARD, *map(str, arguments), "--html", path], capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.browser.open(path, **how)
        self.assertEqual(self.browser.complaints(), [])
        self.assertLessEqual(self.browser("document.documentElement.scrollWidth"), how.get("width", 1280))
        return self.browser

    def test_inspect_folds_layers_and_finds_names(self):
        page = self.page("inspect", SAMPLES / "tp8/checkpoint")
        self.assertIn("231,104", page.text("#maps .tiles"))
        self.assertEqual(page.texts("summary b"), ["layers.{0..3}", "attention", "feed_forward"])
        self.assertEqual(page.texts(".leaf b"), ["wk.weight", "wo.weight", "wq.weight", "wv.weight", "attention_norm.weight",
                                                 "w1.weight", "w2.weight", "w3.weight", "ffn_norm.weight",
                                                 "norm.weight", "output.weight", "tok_embeddings.weight"])
        for query, found, leaves in (("wq", "4 of 39 tensors", 1), ("layers.[23].w?.w", "0 of 39 tensors", 0),
                                     ("layers.2.*w?.weight", "7 of 39 tensors", 7), ("NORM", "9 of 39 tensors", 3)):
            page(f"search.value = {json.dumps(query)}; search.dispatchEvent(new Event('input'))")
            self.assertEqual((page.text("#found"), len(page.texts(".leaf"))), (found, leaves), query)

    def test_inspect_maps_boxes_by_pointer_and_keys(self):
        page = self.page("inspect", SAMPLES / "fsdp2_tp2_optim/checkpoint")
        # The largest tensor of the model is there before anything is selected, without taking the focus or the view.
        self.assertEqual(page.text("#detail h3"), "output.weight")
        self.assertEqual(page("[document.activeElement.tagName, scrollY, document.querySelectorAll('#detail canvas').length]"), ["BODY", 0, 1])
        page("[...document.querySelectorAll('.leaf')].find(e => e.innerText.startsWith('wo.weight')).click()")
        page.settle()
        self.assertEqual(page.text("#detail h3"), "layers.0.attention.wo.weight")
        told = []
        for keys in (["Home"], ["ArrowRight"], ["ArrowDown"], ["ArrowLeft"], ["End"]):
            page.press("#detail canvas", *keys)
            told.append(page.text("#detail .told"))
        self.assertIn("rows 0..31, columns 0..31; 4.10 kB in __0_0.distcp of rank 0", told[0])
        self.assertIn("rows 0..31, columns 32..63; 4.10 kB in __1_0.distcp of rank 1", told[1])
        self.assertIn("rows 32..63, columns 32..63; 4.10 kB in __3_0.distcp of rank 3", told[2])
        self.assertIn("rows 32..63, columns 0..31; 4.10 kB in __2_0.distcp of rank 2", told[3])
        self.assertEqual(told[2], told[4])
        colours = page("(() => { const c = document.querySelector('#detail canvas'), g = c.getContext('2d');"
                       "const at = (x, y) => g.getImageData(c.width * x, c.height * y, 1, 1).data.join();"
                       "return [at(.2, .3), at(.8, .3), at(.2, .8), at(.8, .8)] })()")
        self.assertEqual(len(set(colours)), 4)
        page("document.querySelector('#detail .told button').click()")
        self.assertEqual(page.text("#detail h3"), "__3_0.distcp")
        self.assertIn("layers.0.attention.wo.weight\t1\t4.10 kB", page.text("#detail table"))

    def test_inspect_shows_ranks_and_files(self):
        page = self.page("inspect", SAMPLES / "fsdp2_tp2_optim/checkpoint")
        page("[...document.querySelectorAll('canvas')].at(-1).id = 'ranks'")
        page.press("#ranks", "End")
        held = page.text("#ranks + .told")
        self.assertIn("rank 3 (dp_shard 1, tp 1): 650 kB", held)
        rows = page.texts("#maps section:last-of-type tbody tr")
        self.assertEqual([r.split("\t")[0] for r in rows], [f"__{i}_0.distcp" for i in range(4)])

    def test_copies_are_told(self):
        page = self.page("inspect", SAMPLES / "per_rank_tp2/checkpoint")
        page("[...document.querySelectorAll('.leaf')].find(e => e.innerText.startsWith('norm.weight')).click()")
        page.settle()
        self.assertIn("hatched: several copies", page.text("#detail"))
        page.press("#detail canvas", "End")
        self.assertRegex(page.text("#detail .told"), r"shard 1 of 1: columns 0\.\.63; 128 B in \S+ of rank 0, copy in \S+ of rank 1")

    def test_names_are_shown_and_do_not_run(self):
        path = pathlib.Path(self.directory.name) / "hostile.safetensors"
        write_safetensors(path, HOSTILE)
        page = self.page("inspect", path)
        self.assertIn("reshard inspect", page("document.title"))
        page("document.querySelectorAll('details').forEach(d => d.open = true)")
        shown = page.text("#tree")
        for name in HOSTILE:
            self.assertIn(name.replace("\u202e", "\\u{202e}").split(".")[-1], shown)
        page("document.querySelectorAll('.leaf').forEach(e => e.click())")
        self.assertEqual(page("document.querySelectorAll('img, script').length"), 2)
        page("document.body.append(Object.assign(document.createElement('script'), {textContent: 'document.title = 1'}))")
        self.assertIn("reshard inspect", page("document.title"))

    def test_verify_shows_values(self):
        page = self.page("verify", SAMPLES / "fsdp2_tp2_optim/checkpoint", "--values", dark=True)
        self.assertEqual(page.text(".verdict"), "Passed: 0 errors, 0 warnings, 0 notes")
        self.assertNotIn("optimizer.state", page.text("section table"))  # weights first
        self.assertEqual(page("[...document.querySelectorAll('select')].pop().options.length"), 5)  # kinds of state
        page.press("canvas", "Home")
        self.assertRegex(page.text(".told"), r"layers\.0\.attention\.wk\.weight: absmax 1\.\d+")
        page("document.querySelector('.told .link').click()")
        self.assertEqual(page.text("#exponents h3"), "Exponents of layers.0.attention.wk.weight")
        page("const s = document.querySelector('select'); s.value = 'share of zeros'; s.dispatchEvent(new Event('change'))")
        page.settle()
        page.press("canvas", "Home")
        self.assertIn("0% zeros", page.text(".told"))
        page("[...document.querySelectorAll('details')].find(e => e.innerText.includes('checks passed')).open = true")
        self.assertIn("checksums and digests match", page.text())

    def test_verify_draws_the_exponents_of_each_tensor(self):
        path = pathlib.Path(self.directory.name) / "exponents.safetensors"
        values = {"small": ("F16", "e", [1, 1.5, -1.25, 1.75, 0.5, 4, 0, float("inf")]),
                  "wide": ("F32", "f", [1e-40, -3, 3, 0.0])}
        header, blobs = {}, b""
        for name, (dtype, code, numbers) in values.items():
            blob = struct.pack(f"<{len(numbers)}{code}", *numbers)
            header[name] = {"dtype": dtype, "shape": [len(numbers)], "data_offsets": [len(blobs), len(blobs) + len(blob)]}
            blobs += blob
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + blobs)
        page = self.page("verify", path, "--values", code=1, width=360)
        self.assertEqual(page.text("#exponents h3"), "Exponents of small")  # what is not finite comes first
        told = []
        for keys in (["Home"], ["ArrowRight"], ["ArrowRight"], ["End"]):
            page.press("#exponents canvas", *keys)
            told.append(page.text("#exponents .told"))
        ofall = "that are finite and not zero"
        self.assertEqual(told, [f"magnitude 2^-1 to 2^0 (0.5 to 1): 1 of 6 elements {ofall}, 16.7%",
                                f"magnitude 2^0 to 2^1 (1 to 2): 4 of 6 elements {ofall}, 66.7%",
                                f"magnitude 2^1 to 2^2 (2 to 4): 0 of 6 elements {ofall}, 0%",
                                f"magnitude 2^2 to 2^3 (4 to 8): 1 of 6 elements {ofall}, 16.7%"])
        heights = page("(() => { const c = document.querySelector('#exponents canvas'), g = c.getContext('2d');"
                       "return [0, 1, 2, 3].map(i => { let n = 0; const d = g.getImageData(36 * i + 18, 0, 1, 119).data;"
                       "for (let y = 0; y < 119; ++y) n += d[4 * y + 3] > 0; return n; }) })()")
        for height, bar in zip(heights, (30, 119, 0, 30)):
            self.assertAlmostEqual(height, bar, delta=3)
        page("[...document.querySelectorAll('td .link')].find(e => e.innerText === 'wide').click()")
        page.settle()
        self.assertEqual(page.text("#exponents h3"), "Exponents of wide")
        page.press("#exponents canvas", "Home")
        self.assertIn("magnitude below 2^-126 (1.18e-38): 1 of 3", page.text("#exponents .told"))
        page.press("#exponents canvas", "End")
        self.assertIn("magnitude 2^1 to 2^2 (2 to 4): 2 of 3", page.text("#exponents .told"))

    def test_verify_draws_the_vocabulary(self):
        bad = pathlib.Path(self.directory.name) / "bad"
        subprocess.run([RESHARD, "synth", bad, "--model", "llama3-70b", "--layers", "1", "--to", "hf", "--headers-only", "-q",
                        "--shape", "model.embed_tokens.weight=16064x8192", "--shape", "lm_head.weight=16064x8192"], check=True)
        page = self.page("verify", bad, "--config", bad / "config.json", code=1)
        self.assertIn("16,064 rows;", page.text(".finding h3"))
        self.assertIn("16,064 = 128,512 / 8", page.text(".finding"))
        self.assertEqual(page.texts(".finding .part > span"), ["16,064 stored", "112,192 lost", "256 padding"])
        widths = page("[...document.querySelectorAll('.finding .stack > .part')].map(e => e.offsetWidth)")
        self.assertAlmostEqual(widths[1] / widths[0], 112192 / 16064, delta=0.2)
        self.assertIn("there is no tokenizer.json", page.text("section:last-of-type"))

    def test_diff_of_equal_checkpoints_draws_no_map(self):
        path = SAMPLES / "tp8/checkpoint"
        for arguments in ((path, path), (path, path, path)):
            page = self.page("diff", *arguments)
            self.assertEqual(page("document.querySelectorAll('canvas').length"), 0)
            self.assertIn("Equal", page.text())

    def test_diff_has_the_most_moved_first(self):
        arguments = ("diff", SAMPLES / "hsdp2x4/checkpoint", SAMPLES / "tp8/checkpoint")
        page = self.page(*arguments, code=1, width=360)
        out = subprocess.run([RESHARD, *map(str, arguments), "--json"], capture_output=True, text=True).stdout
        tensors = sorted(json.loads(out)["tensors"], key=lambda t: -t.get("relative_l2", 0))
        self.assertEqual(page.texts("tbody tr td:first-child")[:40], [t["name"] for t in tensors if t["different_elements"]][:40])
        page.press("canvas", "Home")
        self.assertRegex(page.text(".told"), r"relative change \d")

    def test_check_stacks_memory_by_stage(self):
        config = ROOT / "tests/data/configs/llama-3.1-405b.json"
        page = self.page("check", "--config", config, "--mesh", "pp=16,cp=16,dp=4,tp=8", "--world", "16384", code=1, width=360)
        self.assertIn("the degrees multiply to 8,192 ranks", page.text(".finding"))
        bars = page.texts(".bar")
        self.assertEqual(len(bars), 16)
        self.assertIn("stage 0: layers 0..6", bars[0])
        self.assertIn("859 MB", bars[0])
        self.assertEqual(page.texts(".bar:nth-child(2) .part"), ["99.6 MB", "199 MB", "598 MB"])

    def test_plan_shows_who_reads_what(self):
        page = self.page("plan", SAMPLES / "tp8/checkpoint", "--to", "dcp", "--mesh", "tp=4", "--ranks", "4")
        page.press("canvas", "Home")
        self.assertRegex(page.text(".told"), r"__0_0\.distcp reads .* kB in \d+ pieces from __0_0\.distcp")
        self.assertIn("on 4 ranks", page.text("#maps .tiles"))
        self.assertEqual(len(page.texts(".bar")), 4)

    def run_of_steps(self):
        """A run of three steps, and where its models belong. The last step differs from the one before."""
        run, models = (pathlib.Path(self.directory.name, name) for name in ("run", "models"))
        if not run.exists():
            for step, source in ((100, "tp8"), (200, "tp8"), (300, "hsdp2x4")):
                shutil.copytree(SAMPLES / source / "checkpoint", run / f"step-{step}")
                shutil.copy(SAMPLES / source / "config.json", run / f"step-{step}")
        return ("watch", run, models, "--to", "hf", "--once")

    def test_watch_shows_steps_and_what_moved(self):
        page = self.page(*self.run_of_steps(), width=360)
        self.assertIn("3 steps converted, the newest is step-300", page.text(".verdict"))
        rows = [row.split("\t") for row in page.texts("[data-name=steps] tbody tr")]
        self.assertEqual([row[0] for row in rows], ["step-100", "step-200", "step-300"])
        self.assertEqual([row[6] for row in rows[:2]], ["-", "0"])
        self.assertGreater(float(rows[2][6]), 0)
        page.press("canvas", "End")
        self.assertRegex(page.text(".told"), r"in step-300: relative change \S+ since step-200")

    def test_lines_are_told_apart(self):
        steps = [pathlib.Path(self.directory.name, f"layers-{dtype}") for dtype in ("bfloat16", "float16")]
        for step in steps:
            subprocess.run([RESHARD, "synth", step, "--model", "llama3-tiny", "--layers", "29", "--to", "hf", "--dtype",
                            step.name[7:], "-q"], check=True)
        page = self.page("diff", steps[0], steps[1], steps[0], code=1, width=360)
        lines = page("""[...document.querySelectorAll('path.line')].map(path => {
            const canvas = new OffscreenCanvas(1, 1).getContext('2d'), style = getComputedStyle(path);
            canvas.fillStyle = style.stroke;
            canvas.fillRect(0, 0, 1, 1);
            return [[...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)], style.strokeDasharray, path.textContent];
        })""")
        self.assertEqual(len(lines), 32)
        self.assertEqual(len({(tuple(colour), dashes) for colour, dashes, _ in lines}), 32)

        def luminance(colour):
            linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

        for (colour, _, _), (following, _, _) in zip(lines, lines[1:]):
            self.assertGreater(sum(abs(a - b) for a, b in zip(colour, following)), 120, (colour, following))
        for colour, _, name in lines:
            for ground in ((255, 255, 255), (0x1a, 0x20, 0x29)):
                dark, light = sorted((luminance(colour), luminance(ground)))
                self.assertGreater((light + 0.05) / (dark + 0.05), 3, (name, colour))
        # The legend has the same lines, each next to its name.
        legend = page("[...document.querySelectorAll('.keyed')].map(e => [e.innerText, e.querySelector('path').getAttribute('stroke'),"
                      "e.getBoundingClientRect().height])")
        drawn = page("[...document.querySelectorAll('path.line')].map(e => [e.textContent, e.getAttribute('stroke')])")
        self.assertEqual([row[:2] for row in legend], drawn)
        self.assertLess(max(row[2] for row in legend), 30)

    def every_page(self):
        """Arguments and exit code of a page of each command."""
        checkpoint = self.long_path
        config = ROOT / "tests/data/configs/llama-3.1-405b.json"
        return ((("inspect", checkpoint), 0), (("verify", checkpoint, "--values", "--sha256"), 0),
                (("plan", checkpoint, "--to", "dcp", "--mesh", "tp=4"), 0), (("diff", checkpoint, checkpoint), 0),
                (("diff", SAMPLES / "hsdp2x4/checkpoint", SAMPLES / "tp8/checkpoint", checkpoint), 1),
                (self.run_of_steps(), 0),
                (("check", "--config", config, "--mesh", "pp=16,cp=16,dp=4,tp=8", "--world", "16384"), 1))

    def test_every_page_fits_a_phone(self):
        for arguments, code in self.every_page():
            with self.subTest(arguments[0]):
                self.page(*arguments, code=code, width=360)
                self.page(*arguments, code=code, width=2560)

    def test_every_page_says_what_it_is_of(self):
        for arguments, code in self.every_page():
            with self.subTest(arguments[0]):
                page = self.page(*arguments, code=code)
                facts = page.text(".tiles")
                self.assertIn(f"reshard {arguments[0]} ", facts)
                self.assertIn(socket.gethostname(), facts)
                self.assertRegex(facts, r"\d+ files?, [\d.]+ [kM]?B, last changed 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC")
                self.assertRegex(facts, r"report made\s20\d\d-")
                self.assertTrue(page.text(".verdict"))

    def test_every_page_is_read_without_scripts_and_on_paper(self):
        wanted = {"inspect": "layers.{0..3}.attention.wq.weight", "verify": "every element of", "plan": "__0_0.distcp",
                  "diff": "tensors compared", "watch": "model.layers.0", "check": "the degrees multiply to 8,192 ranks"}
        for arguments, code in self.every_page():
            for how in ({"scripts": False}, {"media": "print", "width": 718}):  # what margins leave of A4
                with self.subTest(arguments[0], **how):
                    page = self.page(*arguments, code=code, **how)
                    self.assertIn(wanted[arguments[0]], page.text())
                    if "media" in how:
                        self.assertEqual(page("[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
                                              ".map(e => e.innerText)"), [])
        # Browsers print no backgrounds unless told to, and nothing can be unfolded on paper.
        config = ROOT / "tests/data/configs/llama-3.1-405b.json"
        page = self.page("check", "--config", config, "--mesh", "pp=14,tp=8", "--world", "112", media="print")
        self.assertEqual(page("getComputedStyle(document.querySelector('.stack .part')).printColorAdjust"), "exact")
        self.assertGreater(page("document.querySelector('details:not([open]) tbody tr').getBoundingClientRect().height"), 0)
        page = self.page("verify", SAMPLES / "tp8/checkpoint", "--values", media="print")
        self.assertEqual(page("getComputedStyle(document.querySelector('.ramp i')).printColorAdjust"), "exact")
        page = self.page("verify", SAMPLES / "tp8/checkpoint", "--values", "--sha256", scripts=False)
        digests = json.loads(subprocess.run([RESHARD, "verify", SAMPLES / "tp8/checkpoint", "--json"], capture_output=True).stdout)
        for tensor in digests["tensors"]:
            self.assertIn(tensor["digest"], page.text())

    def test_sums_of_files_are_sha256sums(self):
        page = self.page("verify", SAMPLES / "tp8/checkpoint", "--sha256")
        done = subprocess.run(["sha256sum", "-c"], input=page.text("pre"), cwd=SAMPLES / "tp8/checkpoint", text=True, capture_output=True)
        self.assertEqual((done.returncode, done.stdout.count(": OK")), (0, 10), done.stdout + done.stderr)

    def test_failed_checks_come_first_and_passed_ones_are_folded(self):
        bad = pathlib.Path(self.directory.name) / "rows"
        subprocess.run([RESHARD, "synth", bad, "--model", "llama3-8b", "--layers", "1", "--to", "hf", "--headers-only", "-q",
                        "--shape", "model.embed_tokens.weight=16064x4096"], check=True)
        page = self.page("verify", bad, code=1)
        self.assertEqual(page.text(".verdict"), "Failed: 1 error, 0 warnings, 0 notes")
        titles = page("[...document.querySelectorAll('table[data-name$=checks] thead')].map(e => e.textContent)")
        self.assertEqual([t.split()[0] for t in titles], ["failed", "skipped", "passed"])
        self.assertFalse(page("document.querySelector('details table').checkVisibility()"))

    def test_tables_are_sorted_and_exported(self):
        page = self.page("verify", SAMPLES / "tp8/checkpoint", "--values")
        table = "table[data-name=tensors]"

        def column(at):
            return page(f"[...document.querySelectorAll('{table} tbody tr')].map(r => +r.cells[{at}].dataset.value)")

        before = column(3)
        self.assertEqual(page(f"document.querySelector('{table} th:nth-child(4)').innerText"), "absmax")
        page(f"document.querySelector('{table} th:nth-child(4) button').click()")
        self.assertEqual(column(3), sorted(before))
        page(f"document.querySelector('{table} th:nth-child(4) button').click()")
        self.assertEqual(column(3), sorted(before, reverse=True))
        self.assertEqual(page(f"document.querySelector('{table} th:nth-child(4)').ariaSort"), "descending")
        rows = list(csv.reader(page(f"csvText(document.querySelector('{table}'))").splitlines()))
        self.assertEqual(rows[0][:4], ["tensor", "dtype", "shape", "absmax"])
        self.assertEqual([float(r[3]) for r in rows[1:]], sorted(before, reverse=True))
        self.assertEqual(page("csvField('=1+1')"), "\"'=1+1\"")

    def test_maps_have_legends(self):
        page = self.page("inspect", SAMPLES / "fsdp2_tp2_optim/checkpoint")
        self.assertRegex(page.text(".scale"), r"^\u2212[\d.]+%\s+\+[\d.]+%\s+\(linear scale\)")
        page = self.page("verify", SAMPLES / "tp8/checkpoint", "--values")
        absmax = page("data.tensors.filter(t => t.kind === 'weights').map(t => t.absmax)")
        least, most = page.texts(".scale span:not(.ramp)")[:2]
        self.assertAlmostEqual(float(least), min(absmax), delta=1e-3 * min(absmax))
        self.assertAlmostEqual(float(most), max(absmax), delta=1e-3 * max(absmax))

    def test_thousands_of_tensors(self):
        path = pathlib.Path(self.directory.name) / "many.safetensors"
        write_safetensors(path, [f"model.layers.{i // 50}.mlp.experts.{i % 50}.w" for i in range(5100)])
        page = self.page("verify", path, "--values", width=400)
        self.assertEqual(page("document.querySelectorAll('table[data-name=tensors] tbody tr').length"), 5000)
        self.assertIn("and 100 more (--json has all)", page.text())
        page = self.page("inspect", path)
        self.assertIn("5,100 tensors", page.text())

    @unittest.skipUnless(importlib.util.find_spec("axe_core_python"), "axe-core needed")
    def test_axe_finds_nothing(self):
        axe = pathlib.Path(importlib.util.find_spec("axe_core_python").submodule_search_locations[0], "axe.min.js").read_text()
        for arguments, code in self.every_page():
            for dark in (False, True):
                with self.subTest(arguments[0], dark=dark):
                    page = self.page(*arguments, code=code, dark=dark)
                    page(axe + ";0")
                    self.assertEqual(page("axe.run(document, {resultTypes: ['violations']}).then(r => r.violations.map(v => v.help + ': ' + v.nodes[0].html))"), [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
