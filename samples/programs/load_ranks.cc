// Every rank of a job loads its part of a checkpoint into memory, and says what it has.
//
//   mpirun -n 4 load_ranks CHECKPOINT tp=2,dp_shard=2 [--exchange] [--device cuda] [--names hf] [--dump DIRECTORY]
//   load_ranks CHECKPOINT tp=2,dp_shard=2 --rank 3        one rank alone, without a launcher
//
// On GPUs, of which each rank takes one of its machine, what ranks exchange goes over NCCL. With --dump the bytes of
// each tensor go to DIRECTORY/RANK.NAME.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "formats/load.h"
#include "lib/base/text.h"
#include "lib/transport/job.h"
#include "lib/transport/nccl.h"

using namespace reshard;

namespace {

struct Arguments {
  std::string checkpoint, mesh, names, dump, device = "cpu";
  Index rank = 0;
  bool exchange = false;
};

Result<Arguments> parse(const std::vector<std::string>& words) {
  const Error usage = usage_error(
      "load_ranks CHECKPOINT MESH [--exchange] [--device cpu|cuda] [--names NAMES] [--dump DIRECTORY] [--rank N]");
  if (words.size() < 2) return usage;
  Arguments out{.checkpoint = words[0], .mesh = words[1], .names = "", .dump = ""};
  for (std::size_t i = 2; i < words.size(); ++i) {
    if (words[i] == "--exchange") {
      out.exchange = true;
      continue;
    }
    if (i + 1 == words.size()) return usage;
    if (words[i] == "--names")
      out.names = words[++i];
    else if (words[i] == "--dump")
      out.dump = words[++i];
    else if (words[i] == "--device")
      out.device = words[++i];
    else if (words[i] == "--rank")
      out.rank = std::atoll(words[++i].c_str());
    else
      return usage;
  }
  return out;
}

Result<int> load_part(const Arguments& arguments, Transport* ranks) {
  LoadOptions options;
  options.placement.mesh = TRY(Mesh::parse(arguments.mesh));
  options.rank = arguments.rank;
  options.run.ranks = ranks;
  options.run.strategy = arguments.exchange ? Strategy::kExchange : Strategy::kDirect;
  options.naming.convention = find_convention(arguments.names);
  if (!arguments.names.empty() && !options.naming.convention)
    return usage_error("there are no names '" + arguments.names + "'");

  const auto device = TRY(open_device(arguments.device, 0, local_rank(process_environment)));
  options.run.device = device.get();
  std::unique_ptr<NcclRanks> nccl;
  if (ranks && arguments.exchange && TRY(why_no_nccl(*ranks, device->ordinal())).empty()) {
    nccl = TRY(open_nccl(*ranks, {.device = device->ordinal()}));
    options.run.data = [&]() -> Result<Transport*> { return nccl.get(); };
  }

  const OpenLoad open = TRY(open_load(arguments.checkpoint, options));
  const Load& load = *open.load;

  // The memory is this program's: an engine has its parameters there already.
  std::vector<std::unique_ptr<Device::Memory>> memory;
  std::vector<Destination> destinations;
  for (const LoadTensor& tensor : load.tensors()) {
    memory.push_back(TRY(device->allocate(tensor.bytes(), arguments.dump.empty() ? Sides::kDevice : Sides::kBoth)));
    destinations.push_back({memory.back()->buffer().device.data(), std::nullopt});
  }
  const LoadReport report = TRY(open.load->run(destinations));

  const std::string rank = std::to_string(load.options().rank);
  std::string said = "rank " + rank + ": " + count_of(std::ssize(load.tensors()), "tensor") + ", " +
                     human_bytes(load.bytes()) + ", " + human_bytes(report.bytes_read) + " read\n";
  const auto stream = TRY(device->stream());
  for (std::size_t i = 0; i < memory.size(); ++i) {
    const LoadTensor& tensor = load.tensors()[i];
    said += "rank " + rank + ": " + printable(tensor.name) + " " + std::string(info(tensor.dtype).torch_name) + " " +
            to_string(tensor.shape) + " of " + to_string(tensor.global_shape) + "\n";
    if (arguments.dump.empty()) continue;
    const File file = TRY(File::create(path_join(arguments.dump, rank + "." + tensor.name)));
    TRY(stream->download(memory[i]->buffer(), tensor.bytes()));
    TRY(stream->wait());
    TRY(file.write_at(0, memory[i]->buffer().host));
  }
  for (const LoadProof& proof : report.proofs)
    said += "rank " + rank + ": digest " + proof.part.hex() + " " + printable(proof.name) + "\n";
  std::fwrite(said.data(), 1, said.size(), stdout);
  if (nccl) TRY(nccl->part());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const auto job = join_job({});
  if (!job) {
    std::fprintf(stderr, "load_ranks: %s\n", job.error().message().c_str());
    return static_cast<int>(job.error().code());
  }
  Transport* const ranks = (*job)->ranks();
  const auto done = (*job)->run([&]() -> Result<int> { return load_part(TRY(parse({argv + 1, argv + argc})), ranks); });
  // A failure of one rank is known to all of them, in the same words.
  if (!done && (!ranks || ranks->rank() == 0)) std::fprintf(stderr, "load_ranks: %s\n", done.error().message().c_str());
  return (*job)->end(done ? *done : static_cast<int>(done.error().code()));
}
