#!/usr/bin/env python3
"""Speed of reading ColossalAI's torch.save files and of casts, as ratios of interleaved runs (A B C A B C ...), medians.

  tests/bench/formats_bench.py [--rounds 7] [--work DIRECTORY] [--model llama3-1b] [--layers N] [--pause SECONDS]

Makes a ColossalAI checkpoint of torch.save files (two pipeline stages) and a Hugging Face model in float32, reads both
once so that the page cache holds them, then times:
  cat           cat of ColossalAI's files into one new file
  bin-to-hf     reshard convert of them --to hf, CRC check and digests on
  f32-to-f32    reshard convert of the float32 model --to hf
  f32-to-DTYPE  the same with --dtype; its speed is counted in bytes read
Every output is removed before the next run. Figures go to docs/benchmarks.md with this command.
"""
import interleaved

CASTS = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


def main():
    options = {"layers": {"default": "8"}, "pause": interleaved.PAUSE}
    with interleaved.bench(__doc__, **options) as bench:
        out = bench.path("out")
        model = bench.model("model", "--layers", bench.args.layers, "--to", "hf")
        colossal = bench.made("colossalai", "convert", model, None, "--to", "colossalai", "--shard-format", "bin",
                              "--mesh", "pp=2")
        wide = bench.made("float32", "convert", model, None, "--to", "hf", "--dtype", "float32")
        small, large = interleaved.files_of(colossal), interleaved.files_of(wide)
        convert = [bench.reshard, "convert", wide, out, "--to", "hf", "-q"]
        sides = {"cat": ["sh", "-c", interleaved.cat(small, out)],
                 "bin-to-hf": [bench.reshard, "convert", colossal, out, "--to", "hf", "-q"],
                 "f32-to-f32": convert,
                 **{"f32-to-" + dtype: [*convert, "--dtype", dtype] for dtype in CASTS}}
        files = {name: large if name.startswith("f32") else small for name in sides}
        times, memory, _ = bench.rounds(sides, out, files)
        sizes = {name: interleaved.size_of(of) / 1e9 for name, of in files.items()}
        print(f"ColossalAI {sizes['cat']:.2f} GB, float32 model {sizes['f32-to-f32']:.2f} GB, "
              f"{bench.args.rounds} rounds")
        bases = {name: "cat" if of is small else "f32-to-f32" for name, of in files.items()}
        interleaved.print_table(times, {
            "GB/s": {name: sizes[name] / m for name, m in interleaved.medians(times).items()},
            "/ base": interleaved.ratios(times, bases),
            "peak MiB": interleaved.mebibytes(memory)})


if __name__ == "__main__":
    main()
