#include "formats/vllm/layout.h"
#include "formats/vllm/vllm.h"

namespace reshard::vllm {
namespace {

// Cut into parts by size.
Status add_worker(const VllmLayout& layout, Index worker, LocalFiles& files) {
  std::vector<LocalTensor> in_part;
  Index bytes = 0, part = 0;
  for (const VllmLayout::Stack& p : layout.parameters()) {
    LocalTensor tensor = TRY(layout.local(p, worker));
    const Index size = volume(tensor.shape) * byte_size(tensor.dtype);
    if (!in_part.empty() && size > layout.request().max_file_bytes - bytes) {
      TRY(files.add_file(file_name(worker, part++), in_part));
      in_part.clear();
      bytes = 0;
    }
    bytes += size;
    in_part.push_back(std::move(tensor));
  }
  return files.add_file(file_name(worker, part), in_part);
}

}  // namespace

Result<std::unique_ptr<Target>> lay_out(LayoutRequest request) {
  const VllmLayout layout = TRY(VllmLayout::make(std::move(request)));
  LocalFiles files(layout.request());
  for (Index worker = 0; worker < layout.workers(); ++worker) TRY(add_worker(layout, worker, files));
  return std::move(files).finish();
}

}  // namespace reshard::vllm
