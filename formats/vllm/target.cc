// SPDX-License-Identifier: Apache-2.0
#include <set>

#include "formats/vllm/layout.h"
#include "formats/vllm/vllm.h"
#include "lib/layout/stages.h"

namespace reshard::vllm {
namespace {

// Distributes a worker's tensors over parts by size, with the scales in the last part.
Status add_worker(const VllmLayout& layout, const Worker& worker, bool with_scales, LocalFiles& files) {
  std::set<Index> layers;
  std::vector<LocalTensor> in_part;
  Index bytes = 0, part = 0;
  for (const VllmLayout::Stack& p : layout.parameters()) {
    if (p.stage != worker.stage) continue;
    LocalTensor tensor = TRY(layout.local(p, worker.rank));
    const Index size = volume(tensor.shape) * byte_size(tensor.dtype);
    if (!in_part.empty() && size > layout.request().max_file_bytes - bytes) {
      TRY(files.add_file(file_name(worker, layout.stages(), part++), in_part));
      in_part.clear();
      bytes = 0;
    }
    bytes += size;
    if (const Index layer = layer_number(tensor.name); layer >= 0) layers.insert(layer);
    in_part.push_back(std::move(tensor));
  }
  if (with_scales)
    for (const Index layer : layers)
      for (LocalTensor& scale : scales_of(layer)) in_part.push_back(std::move(scale));
  return files.add_file(file_name(worker, layout.stages(), part), in_part);
}

Result<std::unique_ptr<Target>> lay_out(LayoutRequest request, bool with_scales) {
  if (!request.config)
    return usage_error(
        "--to vllm needs the model's config.json next to its files, without which nothing can read them: give one with "
        "--config, and no --family none");
  const VllmLayout layout = TRY(VllmLayout::make(std::move(request)));
  if (!with_scales && layout.stages() > 1)
    return unsupported(
        "vLLM before 0.32 names the files of sharded_state by tensor-parallel rank alone: expected a mesh "
        "of tp, got " +
        layout.request().mesh.to_string());
  LocalFiles files(layout.request());
  for (Index stage = 0; stage < layout.stages(); ++stage)
    for (Index rank = 0; rank < layout.ranks(); ++rank) TRY(add_worker(layout, {stage, rank}, with_scales, files));
  return std::move(files).finish();
}

}  // namespace

Result<std::unique_ptr<Target>> lay_out(LayoutRequest request) { return lay_out(std::move(request), true); }

Result<std::unique_ptr<Target>> lay_out_without_scales(LayoutRequest request) {
  return lay_out(std::move(request), false);
}

}  // namespace reshard::vllm
