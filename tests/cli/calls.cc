// Makes the calls that the Python module makes of the tools and the library, on several threads at once, each with its
// own family file or none. No call may see what another was given.
//
//     reshard_calls DIRECTORY THREADS ROUNDS      DIRECTORY holds `model`, `config.json` and family_0.json,
//     family_1.json ...
//
// Reports differences on standard error and exits with 1.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "formats/load.h"
#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/memory_limit.h"
#include "tools/commands.h"
#include "tools/python/reading.h"

namespace reshard {
namespace {

using Words = std::vector<std::string>;

// The calls of one thread.
class Caller {
 public:
  Caller(std::string directory, int number) : directory_(std::move(directory)), number_(std::to_string(number)) {}

  Status round(int n) {
    const std::string own = "mine_" + number_,
                      with_file = "--family-file=" + directory_ + "/family_" + number_ + ".json";
    const std::string model = directory_ + "/model", config = "--config=" + directory_ + "/config.json";
    const std::string out = directory_ + "/out_" + number_ + "_" + std::to_string(n);
    TRY(expect_family("verify", {config, with_file, "--memory=64MiB", "--threads=2", model}, own));
    TRY(expect_family("verify", {config, "--threads=2", model}, "llama"));
    TRY(expect_family("check", {config, with_file, "--mesh=tp=2"}, own));
    TRY(expect_family("check", {config, "--mesh=tp=2"}, "llama"));
    TRY(expect_family("plan", {"--to=dcp", config, model}, "llama"));
    TRY(call("inspect", {model}));
    TRY(expect_family("convert", {"--to=dcp", "--names=torchtitan", config, with_file, model, out}, own));
    TRY(expect_family("verify", {config, with_file, "--bytes", out}, own));
    // Its manifest names a family that a call without the family file must not know, even if another thread uses it.
    if (call("verify", {config, "--bytes", out})) return internal_error(out + ": the family of another call is known");
    TRY(call("diff", {config, with_file, model, out}));
    TRY(call("merge", {"--average", "--to=hf", config, with_file, model, out, out + "_merged"}));
    TRY(read(model));
    return load(model);
  }

 private:
  Result<Json> call(const std::string& command, Words words) {
    tools::Host host;
    std::atomic<bool> interrupt{false};
    host.interrupt = &interrupt;
    host.resident = held_bytes();
    host.progress = [](Index, Index) {};
    const bool has_answer = command != "merge";
    words.insert(words.begin(), has_answer ? "--json" : "--quiet");
    TRY(tools::run_for(host, command, words));
    return has_answer ? parse_json(host.answer, command) : Json();
  }

  Status expect_family(const std::string& command, const Words& words, const std::string& expected) {
    const Json answer = TRY(call(command, words));
    const std::string_view got = TRY(answer.get_string("family"));
    if (got == expected) return {};
    return internal_error(command + ": expected family " + expected + ", got " + std::string(got));
  }

  static Status read(const std::string& path) {
    const auto checkpoint = TRY(python::LazyCheckpoint::open(path, {}, {}));
    const Tensor& t = checkpoint->catalog().tensors().front();
    std::vector<std::byte> bytes(static_cast<std::size_t>(t.bytes()));
    std::vector<python::Range> ranges;
    for (const Index n : t.shape) ranges.push_back({0, n, 1});
    python::Watch watch;
    TRY(checkpoint->read(0, ranges, bytes.data(), watch));
    TRY(checkpoint->view({"--names=hf"}));
    return {};
  }

  static Status load(const std::string& path) {
    const python::WantedOptions wanted = TRY(python::wanted_options(path, {}, {}));
    LoadOptions o;
    static_cast<Request&>(o) = wanted.conversion;
    const OpenLoad open = TRY(open_load(path, std::move(o), wanted.open));
    std::vector<std::vector<std::byte>> memory;
    std::vector<Destination> destinations;
    for (const LoadTensor& t : open.load->tensors()) {
      memory.emplace_back(static_cast<std::size_t>(t.bytes()));
      destinations.push_back({memory.back().data(), std::nullopt});
    }
    TRY(open.load->run(destinations));
    return {};
  }

  std::string directory_, number_;
};

int run(const std::string& directory, int threads, int rounds) {
  std::atomic<int> failed{0};
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t)
    all.emplace_back([&, t] {
      Caller caller(directory, t);
      for (int n = 0; n < rounds; ++n)
        if (const Status done = caller.round(n); !done) {
          std::fprintf(stderr, "thread %d: %s\n", t, done.error().message().c_str());
          failed = 1;
        }
    });
  for (std::thread& thread : all) thread.join();
  return failed;
}

}  // namespace
}  // namespace reshard

int main(int argc, char** argv) {
  return argc == 4 ? reshard::run(argv[1], std::atoi(argv[2]), std::atoi(argv[3])) : 2;
}
