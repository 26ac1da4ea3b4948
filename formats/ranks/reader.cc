// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/reader.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "formats/ranks/ranks.h"
#include "formats/tensor_files/joined_tensor.h"
#include "formats/tensor_files/rank_parts.h"
#include "lib/base/text.h"
#include "lib/infer/rank_layout.h"
#include "lib/model/config.h"

namespace reshard::ranks {
namespace {

constexpr Index kMaxLayoutBytes = Index{16} << 20;
constexpr Index kCompareBytes = Index{1} << 20;
// ---- Contents of the files

class RanksReader : public TensorFileReader {
 public:
  Status open(const PathSnapshot& place, const OpenOptions& options);

 private:
  Status choose_files(RankFiles files);
  Status read_file(Index rank, SafetensorsEnd end);
  Status choose_layout(const OpenOptions& options, bool has_layout);
  Status check_patterns() const;
  Status infer_layout(Families families);
  Result<bool> have_same_bytes(std::size_t tensor, Index a, Index b);
  Status check_rank_count() const;

  Status join_parts(const RankParts::Parts& parts);
  Status check_holders(const RankParts::Parts& parts, Index stage) const;
  Result<Dims> whole_shape(const RankParts::Parts& parts) const;
  Status check_part(const RankPart& part, const RankPart& first, const Tensor& tensor, const Dims& expected,
                    const Placement& placement) const;
  std::string rank_path(Index rank) const { return catalog_.file_path(static_cast<std::uint32_t>(rank)); }
  Index ranks() const { return std::ssize(catalog_.files); }
  void describe_format();

  RankParts parts_;
  Index objects_ = 0;
  LayoutDescriptor layout_;
  std::string layout_text_;  // the layout's origin, for people
  bool is_inferred_ = false;
  Index layers_ = 0;
};

// Takes files 0, 1, ... and fails if one is missing.
Status RanksReader::choose_files(RankFiles files) {
  if (files.by_rank.empty()) return io_error(catalog_.root + ": expected a file for each rank, got none");
  if (files.is_ambiguous)
    return unsupported(
        catalog_.root +
        ": expected one file for each rank, with names that differ only in its number; got several files "
        "of one rank, or names of several kinds");
  TRY(check_no_gap(files.by_rank).context(catalog_.root));
  for (const auto& [rank, name] : files.by_rank) catalog_.files.push_back({name, -1, rank});
  catalog_.stale_files = std::move(files.others);
  return {};
}

Status RanksReader::read_file(Index rank, SafetensorsEnd end) {
  const auto file = TRY(files_.open(rank_path(rank)));
  catalog_.files[rank].size = TRY(file->size());
  const TensorFile contents = TRY(TensorFile::open(*file, end));
  add_header_metadata(contents.metadata());
  objects_ += std::ssize(contents.objects());
  for (const TensorFile::Entry& entry : contents.tensors()) {
    parts_.add(entry.name, rank, in_file(entry.tensor, static_cast<std::uint32_t>(rank)), entry.tensor.dtype);
    layers_ = std::max(layers_, layer_number(entry.name) + 1);
  }
  return {};
}

// ---- How they join

Status RanksReader::check_rank_count() const {
  const Index wanted = layout_.mesh->ranks();
  if (wanted == ranks()) return {};
  if (wanted < ranks())
    return usage_error(catalog_.root + ": the layout " + layout_text_ + " has " + count_of(wanted, "rank") + " (" +
                       layout_.mesh->to_string() + "), got files of " + with_commas(ranks()));
  return io_error(catalog_.root + ": the file of rank " + std::to_string(ranks()) +
                  (wanted > ranks() + 1 ? " and those after it are" : " is") + " missing; the layout " + layout_text_ +
                  " has " + count_of(wanted, "rank") + " (" + layout_.mesh->to_string() + ")");
}

// Returns an upper bound of the steps to match all names against a pattern. The text after a '*' is tried at every
// position.
Index steps_of(std::string_view pattern, Index names, Index name_bytes) {
  Index longest = 0;
  for (std::size_t star = pattern.find('*'); star != std::string_view::npos;) {
    const std::size_t next = std::min(pattern.find('*', star + 1), pattern.size());
    longest = std::max<Index>(longest, next - star - 1);
    star = next == pattern.size() ? std::string_view::npos : next;
  }
  return std::ssize(pattern) * names + longest * name_bytes;
}

// Fails if matching the patterns could take hours: a hostile layout file may contain slow ones.
Status RanksReader::check_patterns() const {
  constexpr Index kMaxSteps = 4'000'000'000;
  const Index names = std::ssize(parts_.all());
  Index bytes = 0, steps = 0;
  for (const auto& [name, parts] : parts_.all()) bytes += std::ssize(name);
  const auto add = [&](const std::vector<std::string>& patterns) {
    for (const std::string& pattern : patterns)
      steps = std::min(kMaxSteps + 1, steps + steps_of(pattern, names, bytes));
  };
  for (const TensorRule& rule : layout_.tensors) add(rule.names);
  if (layout_.vocabulary) add(layout_.vocabulary->tensors);
  if (layout_.kv_heads) add(layout_.kv_heads->tensors);
  if (layout_.pipeline) {
    add(layout_.pipeline->first);
    add(layout_.pipeline->last);
    for (const auto& stage : layout_.pipeline->stages) add(stage);
  }
  if (steps <= kMaxSteps) return {};
  return unsupported("the patterns are too long to be matched against " + count_of(names, "name") + " of " +
                     human_bytes(bytes) + ": expected at most " + with_commas(kMaxSteps) +
                     " steps; pass another layout with --source-layout");
}

Status RanksReader::choose_layout(const OpenOptions& options, bool has_layout) {
  if (options.layout) {
    layout_ = *options.layout;
    layout_text_ = "'" + printable(layout_.name) + "'";
    if (!layout_.mesh) layout_ = TRY(layout_.with_mesh(Mesh({{"tp", ranks()}})));
  } else if (has_layout) {
    const std::string path = path_join(catalog_.root, kLayoutFile);
    layout_ = TRY(LayoutDescriptor::parse(TRY(read_whole_file(path, kMaxLayoutBytes)), path));
    layout_text_ = std::string(kLayoutFile);
    TRY(check_patterns().context(path));
    catalog_.metadata_files.push_back(layout_text_);
    if (!layout_.mesh) return corrupt(path + ": expected a mesh, got none");
  } else {
    TRY(infer_layout(Families(options.own_family)));
    is_inferred_ = true;
    layout_text_ = "'inferred'";
  }
  return check_rank_count();
}

Status RanksReader::infer_layout(Families families) {
  std::vector<RankTensor> tensors;
  for (const auto& [name, parts] : parts_.all()) {
    RankTensor t{name, std::vector<std::optional<Dims>>(ranks())};
    for (const RankPart& part : parts) t.shapes[part.rank] = part.stored.shape();
    tensors.push_back(std::move(t));
  }
  const std::optional<ModelConfig> config = TRY(config_of(*this, {}, families));
  layout_ = TRY(infer_rank_layout(catalog_.root, tensors, ranks(), config ? &*config : nullptr, families,
                                  [this](std::size_t t, Index a, Index b) { return have_same_bytes(t, a, b); }));
  return {};
}

// Compares a tensor's bytes in two files. Ranks of one save have equal strides.
Result<bool> RanksReader::have_same_bytes(std::size_t tensor, Index a, Index b) {
  const RankParts::Parts& parts = parts_.all()[tensor];
  const StoredTensor &x = parts.of(a)->stored, &y = parts.of(b)->stored;
  if (x.dtype != y.dtype || x.shape() != y.shape() || x.strides != y.strides) return false;
  const Index bytes = volume(x.shape()) * byte_size(x.dtype);
  if (x.strides != row_major_strides(x.shape()))
    return unsupported(rank_path(a) + ": " + tensor_text(parts.name) +
                       " is not stored in row-major order; pass --source-layout to skip the comparison");
  const auto first = TRY(files_.open(rank_path(a))), second = TRY(files_.open(rank_path(b)));
  std::vector<std::byte> left(std::size_t{kCompareBytes}), right(left.size());
  for (Index done = 0; done < bytes; done += kCompareBytes) {
    const std::size_t n = std::min(kCompareBytes, bytes - done);
    TRY(first->read_at(x.extent.offset + x.start + done, MutableBytes(left).first(n)));
    TRY(second->read_at(y.extent.offset + y.start + done, MutableBytes(right).first(n)));
    if (std::memcmp(left.data(), right.data(), n) != 0) return false;
  }
  return true;
}

// Fails unless exactly the ranks of the tensor's stage have it. If the layout does not assign it to a stage, all ranks
// of each stage that has it must have it.
Status RanksReader::check_holders(const RankParts::Parts& parts, Index stage) const {
  const Mesh& mesh = *layout_.mesh;
  std::vector<bool> has(mesh.size("pp"), false);
  for (const RankPart& part : parts.parts) has[mesh.coordinate(part.rank, "pp")] = true;
  if (stage >= 0) {
    has.assign(has.size(), false);
    has[stage] = true;
  }
  for (Index rank = 0; rank < ranks(); ++rank) {
    const bool should = has[mesh.coordinate(rank, "pp")];
    if (should == (parts.of(rank) != nullptr)) continue;
    const std::string what = rank_path(rank) + ": " + tensor_text(parts.name);
    if (should)
      return corrupt(what + ": expected it, as rank " + std::to_string(parts.first().rank) + " has it; it is missing");
    return corrupt(what + ": expected it on stage " + std::to_string(stage) + " only, as the layout " + layout_text_ +
                   " has it");
  }
  return {};
}

// Returns the shape of the whole: along a dimension that is cut, the sum of the local extents of the ranks along the
// cutting axes.
Result<Dims> RanksReader::whole_shape(const RankParts::Parts& parts) const {
  const Mesh& mesh = *layout_.mesh;
  const RankPart& first = parts.first();
  const auto rule = std::find_if(layout_.tensors.begin(), layout_.tensors.end(),
                                 [&](const TensorRule& r) { return any_glob_matches(r.names, parts.name); });
  Dims shape = first.stored.shape();
  if (rule == layout_.tensors.end()) return shape;
  for (int d = 0; d < shape.rank(); ++d) {
    std::set<std::string> cutting;
    for (const Split& s : rule->splits)
      if (s.dim == d) cutting.insert(s.axes.begin(), s.axes.end());
    if (cutting.empty()) continue;
    Index sum = 0;
    for (const RankPart& part : parts.parts) {
      const bool in_line = std::all_of(mesh.axes().begin(), mesh.axes().end(), [&](const MeshAxis& a) {
        return cutting.contains(a.name) || mesh.coordinate(part.rank, a.name) == mesh.coordinate(first.rank, a.name);
      });
      if (!in_line) continue;
      const auto more =
          part.stored.shape().rank() == shape.rank() ? checked_add(sum, part.stored.shape()[d]) : std::nullopt;
      if (!more)
        return corrupt(rank_path(part.rank) + ": " + tensor_text(parts.name) + ": its shape " +
                       to_string(part.stored.shape()) + " does not join with " + to_string(first.stored.shape()) +
                       " of rank " + std::to_string(first.rank));
      sum = *more;
    }
    shape[d] = sum;
  }
  return shape;
}

Status RanksReader::join_parts(const RankParts::Parts& parts) {
  const std::string where = catalog_.root + ": " + tensor_text(parts.name);
  const DType dtype = parts.first().stored.dtype;
  const Dims shape = TRY(whole_shape(parts));
  TRY(check_size(dtype, shape).context(where));
  Placement placement = TRY(layout_.place(parts.name, shape, layers_).context(catalog_.root));
  TRY(check_holders(parts, placement.stage));
  placement.stage = -1;  // check_holders() has found the holders; each of them has a part
  JoinedTensor joined(parts.name, dtype, shape);
  for (const RankPart& part : parts.parts) {
    const auto boxes = owned_boxes(*layout_.mesh, placement, shape, part.rank);
    TRY(check_part(part, parts.first(), joined.tensor, local_shape(boxes), placement));
    catalog_.shares_extents = catalog_.shares_extents || boxes.size() > 1;  // several boxes are in one stored tensor
    for (const LocalBox& local : boxes) joined.add(part.stored, local);
  }
  return catalog_.add(std::move(joined.tensor));
}

// Fails unless a rank's part has the dtype and the shape that the layout implies.
Status RanksReader::check_part(const RankPart& part, const RankPart& first, const Tensor& tensor, const Dims& expected,
                               const Placement& placement) const {
  const std::string what = rank_path(part.rank) + ": " + tensor_text(tensor.name);
  if (part.stored.dtype != tensor.dtype)
    return corrupt(what + ": expected " + std::string(info(tensor.dtype).torch_name) + " as on rank " +
                   std::to_string(first.rank) + ", got " + std::string(info(part.stored.dtype).torch_name));
  if (part.stored.shape() != expected)
    return corrupt(what + ": expected " + to_string(expected) + ", the part of rank " + std::to_string(part.rank) +
                   " of " + to_string(tensor.shape) + " cut as layout " + layout_text_ + " has it (" +
                   to_string(placement.splits) + "), got " + to_string(part.stored.shape()));
  return {};
}

void RanksReader::describe_format() {
  catalog_.attributes.emplace_back("format",
                                   "files of " + count_of(ranks(), "rank") + ", " + layout_.mesh->to_string());
  std::vector<std::string> evidence;
  if (is_inferred_)
    for (const LayoutEvidence& e : layout_.evidence)
      evidence.push_back(e.about + " " + e.confidence + ": " + e.because);
  catalog_.attributes.emplace_back("joined", is_inferred_ ? join(evidence, "; ") : "under " + layout_text_);
  if (objects_ > 0)
    catalog_.warnings.push_back(count_of(objects_, "object") +
                                " in the rank files not read, because they are not tensors.");
}

Status RanksReader::open(const PathSnapshot& place, const OpenOptions& options) {
  catalog_.root = place.path();
  RankFiles files = find_files(place);
  const bool has_layout = files.has_layout;
  TRY(choose_files(std::move(files)));
  const SafetensorsEnd end = options.files_too ? SafetensorsEnd::kExact : SafetensorsEnd::kUnchecked;
  for (Index rank = 0; rank < ranks(); ++rank) {
    const IoFailureWatch watch;
    if (const Status read = read_file(rank, end); !read) TRY(leave_out(watch, read.error()));
  }
  if (is_partial()) return corrupt(catalog_.root + ": the layout follows from the files of all ranks");
  if (parts_.all().empty()) return corrupt(catalog_.root + ": the files of the ranks hold no tensors");
  TRY(choose_layout(options, has_layout));
  for (const RankParts::Parts& parts : parts_.all()) TRY(join_parts(parts));
  describe_format();
  catalog_.sort_by_name();
  if (options.validated) TRY(validate(catalog_, options.files_too));
  return {};
}

}  // namespace

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options) {
  return open_as<RanksReader>(place, options);
}

}  // namespace reshard::ranks
