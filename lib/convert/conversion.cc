// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/conversion.h"

#include <algorithm>

#include "lib/base/memory_limit.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/provenance.h"
#include "lib/convert/header_metadata.h"
#include "lib/model/parts.h"
#include "lib/output/encoded_chunks.h"
#include "lib/output/journal.h"
#include "lib/source/crc_ledger.h"
#include "lib/transport/collectives.h"

namespace reshard {

namespace {

// Returns about how many boxes a tensor is sharded into; the true number is not much smaller.
Index boxes_of(const TargetTensor& tensor, const Mesh& mesh) {
  Dims left = tensor.shape;  // of the largest box
  Index boxes = 1;
  for (const Split& split : tensor.placement->splits) {
    if (split.dim >= left.rank()) continue;
    Index ranks = 1;
    for (const std::string& axis : split.axes) ranks *= mesh.size(axis);
    Index& extent = left[split.dim];
    if (extent == 0) return 1;
    const Index rows = ceil_div(extent, ranks);
    boxes *= ceil_div(extent, rows);
    extent = rows;
  }
  return boxes;
}

// Fails (usage) if the boxes alone would exceed the memory, before they are computed.
Status check_boxes_fit(const std::vector<TargetTensor>& tensors, const Format& format, const RunOptions& run,
                       const Mesh& mesh) {
  constexpr Index kBoxBytes = 2;            // the least memory of a box (FragmentList::pack)
  constexpr Index kMany = Index{16} << 20;  // a smaller excess is reported later, when all is known
  if (format.holds_whole_tensors()) return {};
  Index boxes = 0;
  for (const TargetTensor& t : tensors) boxes += boxes_of(t, mesh);
  if (boxes * kBoxBytes < kMany) return {};
  release_freed_memory();
  TRY(plan_memory(run, 0, 0, 0, boxes * kBoxBytes));
  return {};
}

}  // namespace

namespace {

// Returns the metadata of the output's headers about its tensors.
Result<HeaderMetadata> output_metadata(const Catalog& source, const Draft& d, const ConversionOptions& o) {
  std::vector<CopiedTensor> tensors;
  for (const TargetTensor& t : d.output.tensors) {
    const auto from = source.find(d.view.native(t.name));
    tensors.push_back({&t, from ? &source.tensors()[*from] : nullptr});
  }
  const bool is_exact = !o.typing.dtype && o.typing.quantize == Quantization::kNone && !o.merge &&
                        !o.selection.merge_adapter && !d.unpacking;
  return copied_metadata(source, tensors, is_exact);
}

// Fails if the target has no place for metadata that its tensors need.
Status check_metadata(const HeaderMetadata& metadata, const Target& target, const Catalog& source, const Format& format,
                      ConversionNotes& notes) {
  if (metadata.entries.empty() || target.holds_header_metadata()) return {};
  if (metadata.needed > 0)
    return unsupported(source.where() + ": " + count_of(metadata.needed, "weight") +
                       " cannot be loaded without the __metadata__ of the safetensors headers, which " +
                       std::string(format.title) + " cannot store; choose a format with safetensors files");
  std::vector<std::string> keys;
  for (const auto& [key, text] : metadata.entries) keys.push_back("'" + printable(key.substr(0, 64)) + "'");
  notes.warnings.push_back("The __metadata__ of the source's safetensors headers is left out, as " +
                           std::string(format.title) + " cannot store it: " + some_of(keys));
  return {};
}

}  // namespace

Result<std::unique_ptr<Conversion>> Conversion::prepare(Reader& source, const Format& format,
                                                        ConversionOptions options) {
  if (!format.lay_out && !format.write_view)
    return unsupported(std::string(format.title) + " can be read but not written");
  std::unique_ptr<Conversion> c(new Conversion(source, format, std::move(options)));
  const ConversionOptions& o = c->options_;
  c->draft_ = TRY(make_draft(source, format, o));
  Draft& d = c->draft_;
  if (format.write_view) {
    c->target_view_ = TRY(name_view(d.view, d.names, o.typing));
    return c;
  }
  std::vector<TargetBlob> blobs = TRY(name_blobs(source, d.view, d.names, !o.metadata_only));
  TRY(check_boxes_fit(d.output.tensors, format, o.run, o.placement.mesh));
  c->note_alike();
  HeaderMetadata metadata = TRY(output_metadata(source.catalog(), d, o));
  LayoutRequest request{std::move(d.output.tensors), std::move(blobs), o.placement.mesh,
                        o.placement.layout,          o.max_file_bytes, o.container,
                        head_counts(d.names.model),  o.compression,    std::nullopt};
  request.header_metadata = metadata.entries;
  request.step = d.step;
  request.renamed = parameter_names(source.catalog(), d.names);
  const bool has_config = d.config.is_there() && (d.config.is_copied || !o.model.is_none());
  if (has_config) request.config = TRY(parse_json(d.config.text, d.config.path));
  c->target_ = TRY(format.lay_out(std::move(request)));  // settles every file, offset and length
  TRY(check_metadata(metadata, *c->target_, source.catalog(), format, d.notes));
  if (d.names.renames()) c->target_view_ = TRY(view_target(c->target_->catalog(), d.names));
  for (const auto& other : d.others) TRY(divide_as_source_of(*other, c->target_view_));
  if (d.merge) write_as(*d.merge, c->target_view(), c->draft_.view.catalog);
  c->plan_ = TRY(make_plan(d.view.catalog, c->target_view()));  // and which box goes where
  c->options_.run.kept_bytes = c->kept_bytes();
  const DataEncoder* const encoder = c->target_->encoder();
  c->options_.run.worker_bytes = (encoder ? encoder->worker_bytes() : 0) + d.requantized.worker_bytes +
                                 (d.unpacking ? d.unpacking->worker_bytes() : 0) +
                                 (d.merge ? merge_bytes(*d.merge) : 0);
  return c;
}

Result<ViewReport> Conversion::write_view(const std::string& destination, bool replace) const {
  return format_.write_view(target_view_, destination, replace);
}

Json Conversion::provenance() const {
  const Catalog& source = source_.catalog();
  const Translation& names = draft_.names;
  std::vector<NamedOrigin> tensors;
  for (const Tensor& t : target_->catalog().tensors())
    if (const auto from = source.find(draft_.view.native(t.name)))
      tensors.emplace_back(t.name, &source.tensors()[*from]);
  ProvenanceOptions options;
  options.vocabulary = draft_.view.catalog.vocabulary;
  if (draft_.merge && draft_.merge->expression.is_xor() && !draft_.merge->options.applies_deltas)
    options.delta_of = draft_.merge->options.sources.back().path;
  options.keeps_names = !names.renames() && !names.plain_names;
  options.model_names = !names.renames() || names.to == Convention::kHf;
  options.holds_optimizer = format_.holds != StateSupport::kModel;
  return provenance_of(source, tensors, options);
}

Index Conversion::disk_needed() const {
  Index sum = 0;
  for (const CatalogFile& f : target_->catalog().files) sum += f.size;
  return sum;
}

Result<MemoryPlan> Conversion::memory() const {
  return copy_memory(plan_, draft_.view.catalog, target_view(), options_.run);
}

// Returns the bytes kept while the output is written: checksums that are written into it, and the journal's two open
// groups.
Index Conversion::kept_bytes() const {
  struct Entries {
    Index bytes = 0;  // of the source
    Index kept = 0;   // tensors, and checksums of the written data
    Index read = 0;   // checksums of the read data
  };
  const auto entries_of = [&](const PlannedTensor& p) {
    const Tensor &from = source_view().tensors()[p.from], &to = target_view().tensors()[p.to];
    return Entries{from.bytes(), 1 + (target_->wants_crcs() ? std::ssize(to.fragments) + std::ssize(to.replicas) : 0),
                   from.fragments.has_crcs() ? std::ssize(from.fragments) : 0};
  };
  Entries open, most;
  std::size_t first = 0;
  Index out = 0;
  for (std::size_t i = 0; i < plan_.tensors.size(); ++i) {
    const Entries mine = entries_of(plan_.tensors[i]);
    open = {open.bytes + mine.bytes, open.kept + mine.kept, open.read + mine.read};
    for (; (open.bytes > 2 * options_.group_bytes || open.kept > 2 * Journal::kEntries) && first < i; ++first) {
      const Entries gone = entries_of(plan_.tensors[first]);
      open = {open.bytes - gone.bytes, open.kept - gone.kept, open.read - gone.read};
    }
    most.kept = std::max(most.kept, open.kept);
    most.read = std::max(most.read, open.read);
    if (target_->wants_crcs()) out += (mine.kept - 1) * CrcLedger::kExtentBytes;
  }
  out += (std::min(most.kept, 2 * Journal::kEntries) + most.read) * Journal::kEntryBytes;
  if (const DataEncoder* const encoder = target_->encoder())
    out += EncodedChunks::memory(*encoder, rank_count(options_.run.ranks));
  return out;
}

void Conversion::note_alike() {
  for (const TargetTensor& t : draft_.output.tensors) {
    auto it = std::find_if(alike_.begin(), alike_.end(),
                           [&](const Alike& a) { return a.shape == t.shape && a.placement == t.placement; });
    if (it == alike_.end()) it = alike_.insert(it, {t.shape, t.placement});
    it->element_bytes += byte_size(t.dtype);
  }
}

std::vector<Index> Conversion::bytes_of_ranks() const {
  if (format_.shares_experts && options_.placement.mesh.size("ep") > 1)
    return {};  // only the format knows which rank has which expert
  std::vector<Index> out(options_.placement.mesh.ranks());
  for (const Alike& a : alike_)
    for (std::size_t rank = 0; rank < out.size(); ++rank)
      for (const LocalBox& b : owned_boxes(options_.placement.mesh, a.placement, a.shape, rank))
        out[rank] += volume(b.box) * a.element_bytes;
  return out;
}

}  // namespace reshard
