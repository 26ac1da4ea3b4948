// Measures what it costs one rank of many to plan its load: Load::prepare() over metadata alone (`reshard synth
// --metadata-only`), without the headers in the data files. For docs/cluster.md.
//
//     reshard_bench_load_plan CHECKPOINT MESH [RANK ...]
#include <malloc.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <string>

#include "formats/open.h"
#include "lib/load/load.h"

using namespace reshard;

namespace {

// A checkpoint's metadata, read as if its data files existed.
class MetadataOnly : public Reader {
 public:
  explicit MetadataOnly(Catalog catalog) {
    catalog_ = std::move(catalog);
    for (CatalogFile& file : catalog_.files) file.size = std::numeric_limits<Index>::max();
  }
  Status locate(const std::vector<std::size_t>&, int, const std::string&) override { return {}; }
  Result<std::string> blob_bytes(const Blob&) override { return unsupported("there are no files"); }
  std::string describe(const Blob&) override { return ""; }
};

double cpu_ms() { return 1e3 * static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

double resident_mb() {
  ::malloc_trim(0);
  long pages = 0, resident = 0;
  if (std::FILE* f = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(f, "%ld %ld", &pages, &resident) != 2) resident = 0;
    std::fclose(f);
  }
  return static_cast<double>(resident) * static_cast<double>(::sysconf(_SC_PAGESIZE)) / 1e6;
}

Status report(const std::string& path, const std::string& mesh, const std::vector<Index>& ranks) {
  double start = cpu_ms();
  auto open = TRY(open_checkpoint(path, {.files_too = false}));
  MetadataOnly reader(std::move(open.reader->catalog()));
  open.reader.reset();
  std::size_t boxes = 0;
  for (const Tensor& t : reader.catalog().tensors()) boxes += t.fragments.size();
  std::printf("%zu tensors, %zu boxes: opened in %.0f ms of CPU, %.0f MB resident\n", reader.catalog().tensors().size(),
              boxes, cpu_ms() - start, resident_mb());
  for (const Index rank : ranks) {
    LoadOptions options;
    options.placement.mesh = TRY(Mesh::parse(mesh));
    options.rank = rank;
    options.run.threads = 1;
    const double before = resident_mb();
    start = cpu_ms();
    const auto load = TRY(Load::prepare(reader, options));
    const double prepared = cpu_ms() - start;
    const double resident = resident_mb() - before;
    ConversionOptions of_load;  // the same options again, for its plan
    of_load.placement.mesh = options.placement.mesh;
    of_load.source_path = path;
    Draft draft = TRY(make_draft(reader, kMemoryFormat, of_load));
    LayoutRequest request;
    request.tensors = std::move(draft.output.tensors);
    request.mesh = options.placement.mesh;
    request.rank = rank;
    const auto target = TRY(MemoryTarget::lay_out(std::move(request)));
    const Catalog target_view = TRY(view_target(target->catalog(), draft.names));
    start = cpu_ms();
    const Plan plan = TRY(make_plan(draft.view.catalog, target_view));
    std::printf("rank %lld: %zu tensors, %lld moves: plan %.1f ms of CPU; prepare() %.0f ms and %.1f MB in all\n",
                static_cast<long long>(rank), load->tensors().size(), static_cast<long long>(plan.moves),
                cpu_ms() - start, prepared, resident);
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s CHECKPOINT MESH [RANK ...]\n", argv[0]);
    return 2;
  }
  std::vector<Index> ranks;
  for (int i = 3; i < argc; ++i) ranks.push_back(std::atoll(argv[i]));
  if (ranks.empty()) ranks.push_back(0);
  const Status status = report(argv[1], argv[2], ranks);
  if (!status) std::fprintf(stderr, "%s\n", status.error().message().c_str());
  return status ? 0 : 1;
}
