// SPDX-License-Identifier: Apache-2.0
#include "tools/inspection.h"

#include <algorithm>
#include <optional>

#include "lib/base/io_failure_watch.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"
#include "lib/convert/weights/adapter.h"
#include "lib/convert/weights/unpacking.h"
#include "lib/model/quantization.h"

namespace reshard::tools {
namespace {

FileFacts look_at_files(const Catalog& catalog) {
  FileFacts facts;
  facts.count = std::ssize(catalog.files);
  facts.needed = bytes_needed(catalog);
  Index needed = 0;
  for (std::size_t f = 0; f < catalog.files.size(); ++f) {
    const Index size = catalog.files[f].size;
    needed = checked_add(needed, facts.needed[f]).value_or(INT64_MAX);
    if (size < 0) {
      ++facts.missing;
    } else if (size < facts.needed[f]) {
      facts.cut_short.push_back(static_cast<std::uint32_t>(f));
    }
    facts.bytes += std::max<Index>(size, 0);
  }
  if (facts.metadata_only()) facts.bytes = needed;
  return facts;
}

void count_tensor(const Tensor& tensor, KindFacts& facts, const StateKey& key) {
  ++facts.tensors;
  facts.elements = checked_add(facts.elements, tensor.elements()).value_or(INT64_MAX);
  facts.bytes = checked_add(facts.bytes, tensor.bytes()).value_or(INT64_MAX);
  facts.dtypes.insert(info(tensor.dtype).torch_name);
  if (key.kind == StateKind::kModel || facts.names.size() > kShownObjects) return;
  std::string name = key.suffix.empty() ? tensor.name : key.suffix.substr(1);
  if (std::find(facts.names.begin(), facts.names.end(), name) == facts.names.end())
    facts.names.push_back(std::move(name));
}

// Returns the elements of the model with its packed weights unpacked; nothing if that of a weight is unknown.
Result<std::optional<Index>> count_parameters(const Inspection& in, const PackedWeights& packed) {
  if (packed.empty()) return std::optional(in.kinds[static_cast<std::size_t>(StateKind::kModel)].elements);
  std::vector<const PackedWeight*> weights;
  for (const PackedWeight& weight : packed.weights)
    if (!weight.parts.empty() && in.shows(in.catalog().tensors()[weight.parts[0].tensor])) weights.push_back(&weight);
  std::optional<Index> sum = TRY(count_unpacked(*in.reader, weights, temporary_directory()));
  const auto& tensors = in.catalog().tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (in.shows(tensors[i]) && state_kind(tensors[i].key()) == StateKind::kModel && !packed.is_of(i))
      sum = sum ? checked_add(*sum, tensors[i].elements()) : std::nullopt;
  return sum;
}

// Ranks objects by how informative they are, the most informative first.
int rank_of_object(const std::string& key) {
  static constexpr std::array<std::string_view, 3> kFirst = {"train_state.", "lr_scheduler.", "dataloader.world_size"};
  for (std::size_t i = 0; i < kFirst.size(); ++i)
    if (key.starts_with(kFirst[i])) return static_cast<int>(i);
  return split_state_key(key).kind == StateKind::kOptimizer ? 5 : key.starts_with("dataloader") ? 4 : 3;
}

// Describes an object. Fails if its bytes cannot be read because of an I/O failure: without them it would seem to have
// no value.
Result<std::string> description_of(Reader& reader, const Blob& blob) {
  const IoFailureWatch watch;
  std::string out = reader.describe(blob);
  if (!out.empty() || !watch.saw_failure()) return out;
  TRY(reader.blob_bytes(blob));
  return reader.describe(blob);
}

Status describe_objects(Inspection& in) {
  std::vector<const Blob*> blobs;
  for (const Blob& b : in.catalog().blobs)
    if (in.shows(b)) blobs.push_back(&b);
  in.object_count = std::ssize(blobs);
  std::stable_sort(blobs.begin(), blobs.end(),
                   [](const Blob* a, const Blob* b) { return rank_of_object(a->key()) < rank_of_object(b->key()); });
  for (std::size_t i = 0; i < std::min(blobs.size(), kShownObjects); ++i)
    in.objects.emplace_back(blobs[i]->name, TRY(description_of(*in.reader, *blobs[i])));
  return {};
}

// Returns the number of data-parallel ranks that torchtitan's data loader recorded.
Result<std::optional<Index>> dataloader_ranks(Reader& reader) {
  for (const Blob& blob : reader.catalog().blobs) {
    if (blob.name != "dataloader.world_size" && blob.name != "dataloader.dp_world_size") continue;
    if (const auto n = parse_number(TRY(description_of(reader, blob)))) return n;
  }
  return std::optional<Index>();
}

}  // namespace

Result<Inspection> look_at(const std::string& path, const SourceOptions& options, bool skip_damaged) {
  OpenCheckpoint open = TRY(options.open(path, false, skip_damaged));
  Inspection in;
  in.path = path;
  in.part = options.part;
  in.format = open.format;
  in.reader = std::move(open.reader);
  in.files = look_at_files(in.catalog());
  if (in.catalog().unread_files.empty())
    in.mesh = infer_mesh(in.catalog(), TRY(dataloader_ranks(*in.reader)));
  else  // the boxes that are left would show another mesh
    in.mesh.placements.assign(in.catalog().tensors().size(), "unknown");
  for (const Tensor& t : in.catalog().tensors()) {
    if (!in.shows(t)) continue;
    const StateKey key = split_state_key(t.key());
    count_tensor(t, in.kinds[static_cast<std::size_t>(key.kind)], key);
  }
  const PackedWeights packed = find_packed(in.catalog(), nullptr);
  if (!packed.empty()) in.packed = packed_text(packed);
  in.parameters = TRY(count_parameters(in, packed));
  in.adapter = TRY(describe_adapter(*in.reader));
  TRY(describe_objects(in));
  return in;
}

std::vector<std::string> problems(const Inspection& in) {
  std::vector<std::string> out;
  const auto& files = in.catalog().files;
  if (in.files.missing > 0 && !in.files.metadata_only()) {
    const auto gone = std::find_if(files.begin(), files.end(), [](const CatalogFile& f) { return f.size < 0; });
    out.push_back("data files missing: " + with_commas(in.files.missing) + " of " + with_commas(in.files.count) +
                  ", the first of them " + printable(gone->path));
  }
  for (const std::uint32_t f : in.files.cut_short)
    out.push_back(printable(files[f].path) + ": has " + count_of(files[f].size, "byte") + ", the metadata needs " +
                  with_commas(in.files.needed[f]) + ": the file is truncated or belongs to another save");
  const auto& unread = in.catalog().unread_files;
  if (unread.empty()) return out;
  if (const auto lacking = tensors_without_data(in.catalog()); !lacking.empty()) {
    const bool is_one = lacking.size() == 1;
    out.push_back(count_of(std::ssize(lacking), "tensor") + (is_one ? " lacks" : " lack") + " parts or all of " +
                  (is_one ? "its" : "their") + " data: " + some_quoted(lacking));
  }
  for (const UnreadFile& file : unread) out.push_back(printable(file.why.message()));
  return out;
}

std::string completeness(const Inspection& in) {
  if (in.files.metadata_only())
    return with_commas(in.files.missing) + " of " + with_commas(in.files.count) +
           " data files are missing: metadata only";
  if (in.files.missing > 0)
    return "incomplete: " + with_commas(in.files.missing) + " of " + with_commas(in.files.count) +
           " data files missing";
  if (const auto unread = std::ssize(in.catalog().unread_files); unread > 0)
    return "damaged: " + count_of(unread, "data file") + " cannot be read";
  if (!in.files.cut_short.empty())
    return "damaged: " + with_commas(std::ssize(in.files.cut_short)) + " of " + with_commas(in.files.count) +
           " data files cut short";
  return "complete";
}

}  // namespace reshard::tools
