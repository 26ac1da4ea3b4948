// Loads a checkpoint into the memory of a GPU, and compares it there with what the CPU gets, or says how long it takes.
//
//   load_cuda CHECKPOINT [DEVICE] [--memory 1GiB] [--threads N] [--time N]      DEVICE: cuda (default), cuda:1, cpu
//
// --time loads N times into the same memory: the first time files may be cold, and pinned memory is made.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "formats/load.h"
#include "lib/base/text.h"
#include "lib/load/dlpack.h"

using namespace reshard;

namespace {

struct Arguments {
  std::string checkpoint, device = "cuda";
  Index memory = Index{256} << 20;
  int threads = 0, times = 0;
};

Result<Arguments> parse(const std::vector<std::string>& words) {
  const Error usage = usage_error("load_cuda CHECKPOINT [DEVICE] [--memory BYTES] [--threads N] [--time N]");
  Arguments out;
  std::vector<std::string> plain;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (!words[i].starts_with("--")) {
      plain.push_back(words[i]);
      continue;
    }
    if (i + 1 == words.size()) return usage;
    if (words[i] == "--memory")
      out.memory = TRY(parse_bytes(words[++i]));
    else if (words[i] == "--threads")
      out.threads = std::atoi(words[++i].c_str());
    else if (words[i] == "--time")
      out.times = std::atoi(words[++i].c_str());
    else
      return usage;
  }
  if (plain.empty() || plain.size() > 2) return usage;
  out.checkpoint = plain[0];
  if (plain.size() == 2) out.device = plain[1];
  return out;
}

// The tensors of a checkpoint on a device.
struct Loaded {
  OpenLoad open;
  std::vector<std::unique_ptr<Device::Memory>> memory;
  std::vector<Destination> destinations;
};

// Memory for them, with nothing in it yet.
Result<Loaded> prepare(Device& device, const Arguments& arguments) {
  LoadOptions options;
  options.run.device = &device;
  options.run.memory = arguments.memory;
  options.run.threads = arguments.threads;
  Loaded out;
  out.open = TRY(open_load(arguments.checkpoint, options));
  for (const LoadTensor& tensor : out.open.load->tensors()) {
    out.memory.push_back(TRY(device.allocate(tensor.bytes(), Sides::kDevice)));
    out.destinations.push_back({out.memory.back()->buffer().device.data(), std::nullopt});
  }
  return out;
}

Status compare(Device& device, const Arguments& arguments) {
  const Loaded gpu = TRY(prepare(device, arguments)), cpu = TRY(prepare(cpu_device(), arguments));
  TRY(gpu.open.load->run(gpu.destinations));
  TRY(cpu.open.load->run(cpu.destinations));
  const auto stream = TRY(device.stream());
  const auto window = TRY(device.allocate(Index{16} << 20));  // of host memory
  const auto& tensors = gpu.open.load->tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    // What an engine is given: torch.from_dlpack() takes it, wrapped in a capsule.
    const dlpack::TensorView view(tensors[i], gpu.destinations[i], {device.is_cpu() ? dlpack::kCpu : dlpack::kCuda, 0});
    const MutableBytes there = gpu.memory[i]->buffer().device, expected = cpu.memory[i]->buffer().device;
    bool same = true;
    for (std::size_t at = 0; at < there.size();) {
      const MutableBytes host = window->buffer().host;
      const std::size_t n = std::min(there.size() - at, host.size());
      TRY(stream->download({host.first(n), there.subspan(at, n)}, static_cast<Index>(n)));
      TRY(stream->wait());
      const std::byte* got = device.is_cpu() ? there.data() + at : host.data();
      same = same && std::memcmp(got, expected.data() + at, n) == 0;
      at += n;
    }
    std::printf("%s: %d dimensions, %d bits, %s\n", printable(tensors[i].name).c_str(), view.tensor().ndim,
                view.tensor().dtype.bits, same ? "as on the CPU" : "DIFFERS from the CPU");
    if (!same) return corrupt("tensor '" + printable(tensors[i].name) + "' differs between devices");
  }
  std::printf("%s on %s\n", human_bytes(gpu.open.load->bytes()).c_str(), std::string(device.name()).c_str());
  return {};
}

Status time_it(Device& device, const Arguments& arguments) {
  const Loaded loaded = TRY(prepare(device, arguments));
  for (int i = 0; i < arguments.times; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    TRY(loaded.open.load->run(loaded.destinations));
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::printf("load %d: %s in %.3f s, %.2f GB/s on %s\n", i + 1, human_bytes(loaded.open.load->bytes()).c_str(),
                seconds, static_cast<double>(loaded.open.load->bytes()) / seconds / 1e9,
                std::string(device.name()).c_str());
  }
  return {};
}

Status run(const Arguments& arguments) {
  const auto device = TRY(open_device(arguments.device, 0));
  return arguments.times > 0 ? time_it(*device, arguments) : compare(*device, arguments);
}

}  // namespace

int main(int argc, char** argv) {
  const auto arguments = parse({argv + 1, argv + argc});
  const Status done = arguments ? run(*arguments) : Status(arguments.error());
  if (done) return 0;
  std::fprintf(stderr, "load_cuda: %s\n", done.error().message().c_str());
  return static_cast<int>(done.error().code());
}
