// A minimal engine: loads rank 1's part of a checkpoint that is cut in two for tensor parallelism.
#include <cstdio>
#include <list>
#include <string>

#include "formats/load.h"

int main(int, char** argv) {
  reshard::LoadOptions options;
  options.placement.mesh = *reshard::Mesh::parse("tp=2");
  options.rank = 1;
  std::list<std::string> memory;
  const auto report = reshard::load(argv[1], options, [&](const reshard::LoadTensor& t) {
    memory.emplace_back(static_cast<std::size_t>(t.bytes()), '\0');
    return reshard::Result<reshard::Destination>(
        reshard::Destination{reinterpret_cast<std::byte*>(memory.back().data()), std::nullopt});
  });
  if (!report) return std::fprintf(stderr, "engine: %s\n", report.error().message().c_str()), 1;
  std::printf("%zu tensors\n", report->proofs.size());
  return 0;
}
