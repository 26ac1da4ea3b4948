// SPDX-License-Identifier: Apache-2.0
#include "lib/load/load.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "lib/base/text.h"
#include "lib/convert/conversion_source.h"
#include "lib/load/load_engine.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

// Copies the tensors without their fragments, which differ between ranks if each has a target of its own.
Result<Catalog> without_fragments(const Catalog& catalog) {
  Catalog out;
  for (const Tensor& t : catalog.tensors()) {
    Tensor tensor;
    tensor.name = t.name;
    tensor.dtype = t.dtype;
    tensor.shape = t.shape;
    TRY(out.add(std::move(tensor)));
  }
  return out;
}

// The digests of one planned tensor over all ranks.
struct PartDigests {
  Digest first;  // placed by ranks that are first replicas
  Digest all;    // placed
  Digest read;
};

}  // namespace

Load::Load(Reader& source, LoadOptions options) : source_(source), options_(std::move(options)) {}
Load::~Load() = default;

Result<std::unique_ptr<Load>> Load::prepare(Reader& source, LoadOptions options) {
  std::unique_ptr<Load> load(new Load(source, std::move(options)));
  TRY(load->check_options());
  const LoadOptions& o = load->options_;
  ConversionOptions conversion;
  static_cast<Request&>(conversion) = o;
  conversion.source_path = source.catalog().root;
  conversion.takes_parts = true;
  conversion.run = o.run;
  // The few tensors that are read before the load are read by every rank, on its CPU.
  conversion.run.progress = nullptr;
  conversion.run.strategy = Strategy::kDirect;
  conversion.run.device = nullptr;
  // A conversion's memory limit counts the whole process, but here that is an engine's.
  conversion.run.memory = std::numeric_limits<Index>::max() / 2;
  Draft& d = load->draft_ = TRY(make_draft(source, kMemoryFormat, conversion));
  LayoutRequest request;
  request.tensors = std::move(d.output.tensors);
  request.mesh = o.placement.mesh;
  if (load->is_direct()) request.rank = o.rank;
  load->target_ = TRY(MemoryTarget::lay_out(std::move(request)));
  load->target_view_ = TRY(view_target(load->target_->catalog(), d.names));
  load->plan_ = TRY(make_plan(d.view.catalog, load->target_view_));
  load->run_ = conversion.run;
  load->held_ = load->target_->held_by(o.rank);
  for (const HeldTensor& held : load->held_) {
    const Tensor& t = load->target_->catalog().tensors()[held.tensor];
    load->tensors_.push_back({t.name, t.dtype, held.shape, t.shape, held.boxes});
  }
  TRY(load->check_ranks_agree());
  return load;
}

Status Load::check_options() {
  LoadOptions& o = options_;
  if (o.placement.layout && !o.placement.layout->mesh)
    return usage_error("layout '" + printable(o.placement.layout->name) + "' has no mesh; add one with with_mesh()");
  if (o.placement.layout) o.placement.mesh = *o.placement.layout->mesh;
  if (o.run.ranks) {
    o.rank = o.run.ranks->rank();
    if (o.placement.mesh.ranks() != o.run.ranks->size())
      return usage_error("mesh " + o.placement.mesh.to_string() + " has " + count_of(o.placement.mesh.ranks(), "rank") +
                         ", but this job has " + std::to_string(o.run.ranks->size()));
  } else if (o.run.strategy == Strategy::kExchange && o.placement.mesh.ranks() > 1) {
    return usage_error("strategy 'exchange' needs a transport (ranks), got none");
  }
  return {};
}

// Each rank computes all messages from the plan, so all ranks need the same plan.
Status Load::check_ranks_agree() const {
  if (!options_.run.ranks) return {};
  const Catalog &from = draft_.view.catalog, &to = target_view_;
  Catalog bare;
  if (is_direct()) bare = TRY(without_fragments(to));
  if (TRY(all_equal(options_.run.ranks, fingerprint(plan_, from, is_direct() ? bare : to)))) return {};
  return io_error(source_.catalog().root +
                  ": the plans of the ranks differ: they see different checkpoints or have different options");
}

Index Load::bytes() const {
  Index sum = 0;
  for (const LoadTensor& t : tensors_) sum += t.bytes();
  return sum;
}

Result<LoadReport> Load::run(std::span<const Destination> destinations) {
  if (destinations.size() != tensors_.size())
    return usage_error("expected destinations for " + count_of(std::ssize(tensors_), "tensor") + ", got " +
                       std::to_string(destinations.size()));
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const LoadTensor& t = tensors_[i];
    const std::string what = "destination of " + tensor_text(t.name);
    if (t.bytes() == 0) continue;
    if (!destinations[i].data)
      return usage_error(what + ": expected memory of " + human_bytes(t.bytes()) + ", got none");
    if (const auto& strides = destinations[i].strides) TRY(check_strides(t.shape, *strides, byte_size(t.dtype), what));
  }
  // Equality holds for all ranks at once, so ranks that load together check it once, and of independent ranks only the
  // first does.
  if (options_.run.ranks || rank() == 0) TRY(check_equal_tensors(draft_, source_.files(), run_));
  ConversionSource origin(draft_, source_, source_);
  const LoadDestinations load_destinations =
      TRY(LoadDestinations::make(plan_, target_view_, *target_, rank(), held_, destinations));
  const RunOptions& run = options_.run;
  TRY(device_of(run).settle());  // the caller's pending work on the destinations
  const LoadJob job{plan_, origin.tensors(), target_view_, *target_, load_destinations, rank(), run};
  const bool together = !is_direct() && options_.run.ranks;
  const LoadDigests digests = TRY(together ? load_together(job) : load_direct(job));
  if (options_.run.ranks || options_.check_whole_items) {
    std::vector<std::byte> scratch(std::size_t{1} << 20);
    TRY(origin.tensors().finish(scratch, options_.run.ranks));
  }
  LoadReport report;
  report.bytes_read = digests.bytes_read;
  report.bytes_received = digests.bytes_received;
  report.checksums = origin.checksums_checked();
  for (std::size_t p = 0; p < plan_.tensors.size(); ++p)
    report.proofs.push_back({job.to(p).name, job.to(p).dtype, digests.placed[p], std::nullopt});
  if (options_.run.ranks) TRY(add_up(digests, report));
  return report;
}

// Adds the digests of the parts in all ranks' shares. The first replicas of the parts together hold each element of a
// tensor once, so their digests add up to the tensor's.
Status Load::add_up(const LoadDigests& digests, LoadReport& report) const {
  std::vector<PartDigests> parts;
  const auto tensor_of = [&](std::size_t p) -> std::optional<std::size_t> {
    const Tensor& to = target_view_.tensors()[plan_.tensors[p].to];
    if (to.fragments.empty()) return std::nullopt;
    return target_->tensor_at(to.fragments.extent(0).offset);
  };
  const bool together = !is_direct();
  for (std::size_t p = 0; p < report.proofs.size(); ++p) {
    const auto tensor = tensor_of(p);
    const bool is_first = tensor && target_->is_first_replica(*tensor, rank());
    parts.push_back({is_first ? digests.placed[p] : Digest(), digests.placed[p],
                     together || is_first ? digests.read[p] : Digest()});
  }
  TRY(combine_values(options_.run.ranks, std::span(parts), [](PartDigests& mine, const PartDigests& theirs) {
    mine.first += theirs.first;
    mine.all += theirs.all;
    mine.read += theirs.read;
  }));
  for (std::size_t p = 0; p < report.proofs.size(); ++p) {
    LoadProof& proof = report.proofs[p];
    const auto& [first, all, read] = parts[p];
    const auto tensor = tensor_of(p);  // unknown if this rank holds none of it; then others check it
    Digest expected = read;
    for (std::uint32_t& word : expected.words)
      word *= static_cast<std::uint32_t>(tensor ? target_->copies(*tensor) : 1);
    if (first != read)
      return io_error(tensor_text(proof.name) + ": data changed between reading and placing: expected digest " +
                      read.hex() + ", got " + first.hex());
    if (tensor && all != expected)
      return io_error(tensor_text(proof.name) + ": replicas differ: expected the sum of digests " + expected.hex() +
                      ", got " + all.hex());
    proof.whole = first;
  }
  return {};
}

}  // namespace reshard
