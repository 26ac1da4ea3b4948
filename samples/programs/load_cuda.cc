// Loads a checkpoint into the memory of a GPU, and compares it there with what the CPU gets.
//
//   load_cuda CHECKPOINT [DEVICE]        DEVICE: cuda (default), cuda:1, cpu
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "formats/load.h"
#include "lib/base/text.h"
#include "lib/load/dlpack.h"

using namespace reshard;

namespace {

// The tensors of a checkpoint on a device, and what shows them to others.
struct Loaded {
  OpenLoad open;
  std::vector<std::unique_ptr<Device::Memory>> memory;
  std::vector<Destination> destinations;
  LoadReport report;
};

Result<Loaded> load_onto(Device& device, const std::string& checkpoint) {
  LoadOptions options;
  options.device = &device;
  Loaded out;
  out.open = TRY(open_load(checkpoint, options));
  for (const LoadTensor& tensor : out.open.load->tensors()) {
    out.memory.push_back(TRY(device.allocate(tensor.bytes())));
    out.destinations.push_back({out.memory.back()->buffer().device.data(), std::nullopt});
  }
  out.report = TRY(out.open.load->run(out.destinations));
  return out;
}

Status run(const std::string& checkpoint, const std::string& name) {
  const auto device = TRY(open_device(name, 0));
  const Loaded gpu = TRY(load_onto(*device, checkpoint)), cpu = TRY(load_onto(cpu_device(), checkpoint));
  const auto stream = TRY(device->stream());
  const auto& tensors = gpu.open.load->tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    // What an engine is given: torch.from_dlpack() takes it, wrapped in a capsule.
    const dlpack::TensorView view(tensors[i], gpu.destinations[i],
                                  {device->is_cpu() ? dlpack::kCpu : dlpack::kCuda, 0});
    TRY(stream->download(gpu.memory[i]->buffer(), tensors[i].bytes()));
    TRY(stream->wait());
    const MutableBytes here = gpu.memory[i]->buffer().host, there = cpu.memory[i]->buffer().host;
    const bool same = tensors[i].bytes() == 0 ||
                      std::memcmp(here.data(), there.data(), static_cast<std::size_t>(tensors[i].bytes())) == 0;
    std::printf("%s: %d dimensions, %d bits, %s\n", printable(tensors[i].name).c_str(), view.tensor().ndim,
                view.tensor().dtype.bits, same ? "as on the CPU" : "DIFFERS from the CPU");
    if (!same) return corrupt("tensor '" + printable(tensors[i].name) + "' differs between devices");
  }
  std::printf("%s on %s\n", human_bytes(gpu.open.load->bytes()).c_str(), std::string(device->name()).c_str());
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  const Status done = argc == 2 || argc == 3 ? run(argv[1], argc == 3 ? argv[2] : "cuda")
                                             : Status(usage_error("load_cuda CHECKPOINT [DEVICE]"));
  if (done) return 0;
  std::fprintf(stderr, "load_cuda: %s\n", done.error().message().c_str());
  return static_cast<int>(done.error().code());
}
