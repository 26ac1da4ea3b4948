// Makes the calls that the Python module makes of the tools and the library, on several threads at once, each with its
// own family file or none. No call may see what another was given.
//
//     reshard_calls DIRECTORY THREADS ROUNDS      DIRECTORY holds `model`, `config.json` and family_0.json,
//     family_1.json ...
//     reshard_calls --shared CHECKPOINT THREADS   reads all tensors of one open checkpoint on each thread
//
// Reports differences on standard error and exits with 1.
#include <atomic>
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

Result<std::vector<std::byte>> whole(python::LazyCheckpoint& checkpoint, std::size_t tensor) {
  const Tensor& t = checkpoint.catalog().tensors()[tensor];
  std::vector<std::byte> bytes(static_cast<std::size_t>(t.bytes()));
  std::vector<python::Range> ranges;
  for (const Index n : t.shape) ranges.push_back({0, n, 1});
  python::Watch watch;
  TRY(checkpoint.read(tensor, ranges, bytes.data(), watch));
  return bytes;
}

// The calls of one thread.
class Caller {
 public:
  struct Expected;
  Caller(std::string directory, int number, const Expected& expected)
      : directory_(std::move(directory)), number_(std::to_string(number)), expected_(expected) {}

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
    if (TRY(read(model)) != expected_.read) return internal_error(model + ": a read returned other bytes");
    if (TRY(load(model)) != expected_.loaded) return internal_error(model + ": a load returned other bytes");
    return {};
  }

  // What read() and load() return while no other thread runs.
  struct Expected {
    std::vector<std::byte> read;
    std::vector<std::vector<std::byte>> loaded;
  };
  static Result<Expected> alone(const std::string& directory) {
    return Expected{TRY(read(directory + "/model")), TRY(load(directory + "/model"))};
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

  static Result<std::vector<std::byte>> read(const std::string& path) {
    const auto checkpoint = TRY(python::LazyCheckpoint::open(path, {}, {}));
    TRY(checkpoint->view({"--names=hf"}));
    return whole(*checkpoint, 0);
  }

  static Result<std::vector<std::vector<std::byte>>> load(const std::string& path) {
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
    return memory;
  }

  std::string directory_, number_;
  const Expected& expected_;
};

// Runs `work` on each of several threads. Returns whether all succeeded.
bool succeeds_on(int threads, const std::function<Status(int thread)>& work) {
  std::atomic<bool> ok{true};
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t)
    all.emplace_back([&, t] {
      if (const Status done = work(t); !done) {
        std::fprintf(stderr, "thread %d: %s\n", t, done.error().message().c_str());
        ok = false;
      }
    });
  for (std::thread& thread : all) thread.join();
  return ok;
}

Result<bool> call_on_threads(const std::string& directory, int threads, int rounds) {
  const Caller::Expected expected = TRY(Caller::alone(directory));
  return succeeds_on(threads, [&](int t) -> Status {
    Caller caller(directory, t, expected);
    for (int n = 0; n < rounds; ++n) TRY(caller.round(n));
    return {};
  });
}

// Each thread begins at another tensor, so that the first read of each tensor, which locates it, meets reads of others.
Result<bool> share(const std::string& path, int threads) {
  const auto alone = TRY(python::LazyCheckpoint::open(path, {}, {}));
  const std::size_t tensors = alone->catalog().tensors().size();
  std::vector<std::vector<std::byte>> expected;
  for (std::size_t i = 0; i < tensors; ++i) expected.push_back(TRY(whole(*alone, i)));
  const auto shared = TRY(python::LazyCheckpoint::open(path, {}, {}));
  return succeeds_on(threads, [&](int t) -> Status {
    for (std::size_t n = 0; n < tensors; ++n) {
      const std::size_t i = (n + tensors * static_cast<std::size_t>(t) / static_cast<std::size_t>(threads)) % tensors;
      if (TRY(whole(*shared, i)) != expected[i])
        return internal_error(path + ": other bytes of " + shared->catalog().tensors()[i].name);
    }
    return {};
  });
}

int run(const std::vector<std::string>& words) {
  const bool is_shared = words[0] == "--shared";
  const auto ok = is_shared ? share(words[1], std::stoi(words[2]))
                            : call_on_threads(words[0], std::stoi(words[1]), std::stoi(words[2]));
  if (!ok.has_value()) std::fprintf(stderr, "%s\n", ok.error().message().c_str());
  return ok.has_value() && *ok ? 0 : 1;
}

}  // namespace
}  // namespace reshard

int main(int argc, char** argv) { return argc == 4 ? reshard::run({argv + 1, argv + argc}) : 2; }
