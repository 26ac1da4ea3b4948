// SPDX-License-Identifier: Apache-2.0
#include "lib/layout/descriptor.h"

#include <algorithm>
#include <array>
#include <set>

#include "lib/base/choices.h"
#include "lib/base/file.h"
#include "lib/base/text.h"
#include "lib/layout/padded_vocabulary.h"

namespace reshard {
namespace {

constexpr Index kVersion = 1;
// Of all patterns together, because each tensor's name is matched against all of them.
constexpr Index kMaxPatternBytes = 262'144;
constexpr Index kMaxGroups = 64;  // product over the splits of a tensor: each rank has that many boxes
constexpr Index kMaxRows = Index{1} << 40;
constexpr Index kMaxDivisor = Index{1} << 20;

constexpr std::array<std::pair<PaddingContent, std::string_view>, 3> kPaddingContentNames = {{
    {PaddingContent::kUnknown, "unknown"},
    {PaddingContent::kZero, "zero"},
    {PaddingContent::kInitialised, "initialised"},
}};
constexpr std::array<std::string_view, 3> kConfidences = {"certain", "likely", "unknown"};

template <class List>
std::string list_text(const List& names) {
  return join({names.begin(), names.end()}, ", ");
}

// ---- Reading

class DescriptorReader {
 public:
  explicit DescriptorReader(LayoutDescriptor& out) : out_(out) {}

  Status read(const Json& json) {
    TRY(json.as_object());
    const Index version = TRY(json.get_index("reshard_layout"));
    if (version != kVersion)
      return unsupported("reshard_layout: expected version " + std::to_string(kVersion) + ", got " +
                         std::to_string(version));
    TRY(only(json, {"reshard_layout", "name", "description", "mesh", "files", "tensors", "vocabulary", "pipeline",
                    "kv_heads", "evidence", "notes", "schema"}));
    out_.name = TRY(json.get_string("name"));
    if (out_.name.empty()) return corrupt("name: expected a name, got an empty string");
    if (json.contains("description")) out_.description = TRY(json.get_string("description"));
    if (json.contains("mesh")) out_.mesh = TRY(read_mesh(json).context("mesh"));
    TRY(read_files(json));
    TRY(each(json, "tensors", [&](const Json& item) { return read_rule(item); }));
    if (const Json* found = json.find("vocabulary")) TRY(read_vocabulary(*found).context("vocabulary"));
    if (const Json* found = json.find("pipeline")) TRY(read_pipeline(*found).context("pipeline"));
    if (const Json* found = json.find("kv_heads")) TRY(read_kv_heads(*found).context("kv_heads"));
    if (json.contains("evidence")) TRY(each(json, "evidence", [&](const Json& item) { return read_evidence(item); }));
    if (json.contains("notes")) {
      TRY(each(json, "notes", [&](const Json& item) -> Status {
        out_.notes.emplace_back(TRY(item.as_string()));
        return {};
      }));
    }
    return {};
  }

 private:
  static Status only(const Json& object, std::initializer_list<std::string_view> known) {
    for (const Json::Member& member : TRY(object.as_object()))
      if (std::find(known.begin(), known.end(), member.key) == known.end())
        return corrupt("member '" + printable(member.key) + "' is unknown" +
                       choices_text(member.key, {known.begin(), known.end()}));
    return {};
  }

  // Reads each item of a list; errors begin with "tensors[3]: ".
  template <class Read>
  static Status each(const Json& object, std::string_view key, Read read) {
    Index i = 0;
    for (const Json& item : TRY(object.get_array(key)))
      TRY(read(item).context(std::string(key) + "[" + std::to_string(i++) + "]"));
    return {};
  }

  static Result<Index> number(const Json& object, std::string_view key, Index least, Index most) {
    const Index n = TRY(object.get_index(key));
    if (n >= least && n <= most) return n;
    return corrupt(std::string(key) + ": expected a number from " + with_commas(least) + " to " + with_commas(most) +
                   ", got " + with_commas(n));
  }

  static Result<std::optional<Index>> optional_number(const Json& object, std::string_view key, Index most) {
    if (!object.contains(key)) return std::optional<Index>();
    return std::optional<Index>(TRY(number(object, key, 1, most)));
  }

  Result<std::string> pattern(const Json& json) {
    const std::string_view text = TRY(json.as_string());
    if (text.empty()) return corrupt("expected a pattern, got an empty string");
    pattern_bytes_ += std::ssize(text);
    if (pattern_bytes_ > kMaxPatternBytes)
      return unsupported("expected at most " + with_commas(kMaxPatternBytes) + " bytes of patterns in all, got " +
                         with_commas(pattern_bytes_));
    return std::string(text);
  }

  Result<std::vector<std::string>> patterns(const Json& object, std::string_view key) {
    std::vector<std::string> out;
    TRY(each(object, key, [&](const Json& item) -> Status {
      out.push_back(TRY(pattern(item)));
      return {};
    }));
    return out;
  }

  static Result<Mesh> read_mesh(const Json& json) {
    std::vector<MeshAxis> axes;
    std::set<std::string> seen;
    Index ranks = 1;
    for (const Json& item : TRY(json.find("mesh")->as_array())) {
      TRY(only(item, {"axis", "size"}));
      MeshAxis axis{std::string(TRY(item.get_string("axis"))), 1};
      if (std::find(kMeshAxes.begin(), kMeshAxes.end(), axis.name) == kMeshAxes.end())
        return corrupt("axis: expected one of " + list_text(kMeshAxes) + ", got '" + printable(axis.name) + "'");
      if (!seen.insert(axis.name).second) return corrupt("axis '" + axis.name + "' is listed twice");
      axis.size = TRY(number(item, "size", 1, kMaxMeshRanks).context(axis.name));
      ranks = checked_mul(ranks, axis.size).value_or(kMaxMeshRanks + 1);
      if (ranks > kMaxMeshRanks) return corrupt("expected at most " + with_commas(kMaxMeshRanks) + " ranks");
      if (axis.size > 1) axes.push_back(std::move(axis));
    }
    return Mesh(std::move(axes));
  }

  Status read_files(const Json& json) {
    const std::string_view files = TRY(json.get_string("files"));
    if (files != "shards" && files != "whole")
      return corrupt("files: expected shards or whole, got '" + printable(files) + "'");
    out_.stored_as = files == "whole" ? StoredAs::kWhole : StoredAs::kShards;
    return {};
  }

  Status read_rule(const Json& json) {
    TRY(only(json, {"names", "splits"}));
    TensorRule rule;
    rule.names = TRY(patterns(json, "names"));
    if (rule.names.empty()) return corrupt("names: expected at least one pattern");
    std::set<std::string> axes;
    Index groups = 1;
    TRY(each(json, "splits", [&](const Json& item) -> Status {
      Split split = TRY(read_split(item));
      for (const std::string& axis : split.axes)
        if (!axes.insert(axis).second) return corrupt("axes: axis '" + axis + "' cuts this tensor twice");
      groups *= split.groups;  // no overflow: both factors are at most kMaxGroups
      if (groups > kMaxGroups)
        return corrupt("groups: expected a product of at most " + with_commas(kMaxGroups) + " for one tensor");
      if (split.groups > 1 && std::any_of(rule.splits.begin(), rule.splits.end(),
                                          [&](const Split& earlier) { return earlier.dim == split.dim; }))
        return corrupt("groups: dimension " + std::to_string(split.dim) +
                       " has sections but was cut by an earlier split; put this split first");
      rule.splits.push_back(std::move(split));
      return {};
    }));
    out_.tensors.push_back(std::move(rule));
    return {};
  }

  static Result<Split> read_split(const Json& json) {
    TRY(only(json, {"axes", "dim", "groups"}));
    Split split;
    TRY(each(json, "axes", [&](const Json& item) -> Status {
      const std::string_view axis = TRY(item.as_string());
      constexpr std::array<std::string_view, 4> kCutting = {"dp_shard", "cp", "tp", "ep"};
      if (std::find(kCutting.begin(), kCutting.end(), axis) == kCutting.end())
        return corrupt("expected one of " + list_text(kCutting) + ", got '" + printable(axis) + "'");
      split.axes.emplace_back(axis);
      return {};
    }));
    if (split.axes.empty()) return corrupt("axes: expected at least one axis");
    split.dim = static_cast<int>(TRY(number(json, "dim", 0, kMaxRank - 1)));
    if (json.contains("groups")) split.groups = TRY(number(json, "groups", 1, kMaxGroups));
    return split;
  }

  Status read_vocabulary(const Json& json) {
    TRY(only(json, {"tensors", "size", "make_vocab_size_divisible_by", "padded_size", "padding"}));
    Vocabulary v;
    v.tensors = TRY(patterns(json, "tensors"));
    v.size = TRY(optional_number(json, "size", kMaxRows));
    v.divisible_by = TRY(optional_number(json, "make_vocab_size_divisible_by", kMaxDivisor));
    v.padded_size = TRY(optional_number(json, "padded_size", kMaxRows));
    if (json.contains("padding")) {
      const std::string_view text = TRY(json.get_string("padding"));
      const auto* found = std::find_if(kPaddingContentNames.begin(), kPaddingContentNames.end(),
                                       [&](const auto& known) { return known.second == text; });
      if (found == kPaddingContentNames.end())
        return corrupt("padding: expected zero, initialised or unknown, got '" + printable(text) + "'");
      v.padding = found->first;
    }
    out_.vocabulary = std::move(v);
    return {};
  }

  Status read_pipeline(const Json& json) {
    TRY(only(json, {"rule", "first", "last", "stages"}));
    Pipeline p;
    if (json.contains("rule") == json.contains("stages"))
      return corrupt("expected one of rule and stages, got both or neither");
    if (json.contains("rule")) {
      const std::string_view text = TRY(json.get_string("rule"));
      p.rule = stage_rule_from_name(text);
      if (!p.rule) return corrupt("rule: expected torchtitan, colossalai or even, got '" + printable(text) + "'");
      p.first = TRY(patterns(json, "first"));
      p.last = TRY(patterns(json, "last"));
    } else {
      TRY(only(json, {"stages"}));
      TRY(each(json, "stages", [&](const Json& stage) -> Status {
        p.stages.emplace_back();
        for (const Json& item : TRY(stage.as_array())) p.stages.back().push_back(TRY(pattern(item)));
        return {};
      }));
      if (p.stages.empty()) return corrupt("stages: expected at least one stage");
    }
    out_.pipeline = std::move(p);
    return {};
  }

  Status read_kv_heads(const Json& json) {
    TRY(only(json, {"tensors", "replication"}));
    KvHeads heads;
    heads.tensors = TRY(patterns(json, "tensors"));
    heads.replication = TRY(number(json, "replication", 1, kMaxMeshRanks));
    out_.kv_heads = std::move(heads);
    return {};
  }

  Status read_evidence(const Json& json) {
    TRY(only(json, {"about", "confidence", "because"}));
    LayoutEvidence e;
    e.about = TRY(json.get_string("about"));
    e.confidence = TRY(json.get_string("confidence"));
    e.because = TRY(json.get_string("because"));
    if (std::find(kConfidences.begin(), kConfidences.end(), e.confidence) == kConfidences.end())
      return corrupt("confidence: expected certain, likely or unknown, got '" + printable(e.confidence) + "'");
    out_.evidence.push_back(std::move(e));
    return {};
  }

  LayoutDescriptor& out_;
  Index pattern_bytes_ = 0;
};

// Checks the members of a descriptor against each other, as far as the mesh is known.
Status check(const LayoutDescriptor& layout) {
  if (const auto& v = layout.vocabulary) {
    if (v->size && v->padded_size && *v->padded_size < *v->size)
      return corrupt("vocabulary: padded_size: expected at least size, " + with_commas(*v->size) + ", got " +
                     with_commas(*v->padded_size));
    if (layout.mesh && v->size && v->divisible_by && v->padded_size) {
      LayoutDescriptor computed = layout;
      computed.vocabulary->padded_size.reset();
      const Index rows = TRY(computed.padded_rows(*v->size));
      if (rows != *v->padded_size)
        return corrupt("vocabulary: padded_size: expected " + with_commas(rows) + ", the next multiple of " +
                       with_commas(*v->divisible_by) + " x tp " + with_commas(layout.mesh->size("tp")) + ", got " +
                       with_commas(*v->padded_size));
    }
  }
  if (layout.mesh && layout.pipeline && !layout.pipeline->rule) {
    const Index listed = std::ssize(layout.pipeline->stages), stages = layout.mesh->size("pp");
    if (listed != stages)
      return corrupt("pipeline: stages: expected pp = " + with_commas(stages) + " lists, got " + with_commas(listed));
  }
  return {};
}

// ---- Writing

Json strings(const std::vector<std::string>& list) {
  Json out = Json::array();
  for (const std::string& text : list) out.push_back(text);
  return out;
}

Json rule_json(const TensorRule& rule) {
  Json splits = Json::array();
  for (const Split& s : rule.splits) {
    Json split = Json::object().set("axes", strings(s.axes)).set("dim", s.dim);
    if (s.groups != 1) split.set("groups", s.groups);
    splits.push_back(std::move(split));
  }
  return Json::object().set("names", strings(rule.names)).set("splits", std::move(splits));
}

Json vocabulary_json(const Vocabulary& v) {
  Json out = Json::object().set("tensors", strings(v.tensors));
  if (v.size) out.set("size", *v.size);
  if (v.divisible_by) out.set("make_vocab_size_divisible_by", *v.divisible_by);
  if (v.padded_size) out.set("padded_size", *v.padded_size);
  return out.set("padding", padding_content_name(v.padding));
}

Json pipeline_json(const Pipeline& p) {
  if (p.rule)
    return Json::object()
        .set("rule", stage_rule_name(*p.rule))
        .set("first", strings(p.first))
        .set("last", strings(p.last));
  Json stages = Json::array();
  for (const auto& stage : p.stages) stages.push_back(strings(stage));
  return Json::object().set("stages", std::move(stages));
}

// ---- Placing

std::string shown(const LayoutDescriptor& layout) { return "layout '" + printable(layout.name) + "'"; }

Result<Index> stage_of(const LayoutDescriptor& layout, std::string_view tensor, Index layers) {
  const Index stages = layout.mesh->size("pp");
  if (stages == 1 || !layout.pipeline) return Index{-1};
  const Pipeline& p = *layout.pipeline;
  if (!p.rule) {
    for (std::size_t s = 0; s < p.stages.size(); ++s)
      if (any_glob_matches(p.stages[s], tensor)) return static_cast<Index>(s);
    return Index{-1};
  }
  if (any_glob_matches(p.first, tensor)) return Index{0};
  if (any_glob_matches(p.last, tensor)) return stages - 1;
  const Index layer = layer_number(tensor);
  if (layer < 0) return Index{-1};
  TRY(check_stages(*p.rule, layers, stages).context(shown(layout)));
  return stage_of_layer(*p.rule, layer, layers, stages);
}

Result<Placement> place_as_ruled(const LayoutDescriptor& layout, std::string_view tensor, const Dims& shape,
                                 Index layers) {
  const std::string what = shown(layout) + ": " + tensor_text(tensor) + " " + to_string(shape);
  if (!layout.mesh) return usage_error(shown(layout) + " has no mesh; add one with --mesh");
  const auto rule = std::find_if(layout.tensors.begin(), layout.tensors.end(),
                                 [&](const TensorRule& r) { return any_glob_matches(r.names, tensor); });
  if (rule == layout.tensors.end())
    return usage_error(what + ": the layout has no pattern for this name; add a rule for it");
  Placement placement;
  placement.stage = TRY(stage_of(layout, tensor, layers));
  if (shape.rank() == 0) return placement;
  for (const Split& s : rule->splits) {
    if (s.dim >= shape.rank())
      return usage_error(what + ": the layout cuts dimension " + std::to_string(s.dim) + ", which does not exist");
    if (shape[s.dim] % s.groups != 0)
      return usage_error(what + ": dimension " + std::to_string(s.dim) + ": the layout expects " +
                         std::to_string(s.groups) + " equal sections, got " + count_of(shape[s.dim], "element"));
  }
  placement.splits = rule->splits;
  return placement;
}

// Fails if the ranks hold vocabulary rows that the tensor lacks.
Status check_rows(const LayoutDescriptor& layout, std::string_view tensor, const Dims& shape) {
  if (!layout.vocabulary || shape.rank() == 0 || !any_glob_matches(layout.vocabulary->tensors, tensor)) return {};
  const Index padded = TRY(layout.padded_rows(shape[0]));
  if (shape[0] == padded) return {};
  const std::string what = shown(layout) + ": " + tensor_text(tensor) + " " + to_string(shape);
  if (shape[0] > padded)
    return usage_error(what + ": expected at most " + with_commas(padded) + " vocabulary rows, got " +
                       with_commas(shape[0]));
  return unsupported(what + ": the layout pads the vocabulary to " + count_of(padded, "row") + ", but the tensor has " +
                     with_commas(shape[0]) + "; the missing rows would have to be invented");
}

}  // namespace

std::string_view padding_content_name(PaddingContent content) {
  for (const auto& [value, name] : kPaddingContentNames)
    if (value == content) return name;
  return "";
}

Result<LayoutDescriptor> LayoutDescriptor::parse(std::string_view text, std::string_view path) {
  const Json json = TRY(parse_json(text, path));
  LayoutDescriptor layout;
  TRY(DescriptorReader(layout).read(json).context(path));
  TRY(check(layout).context(path));
  return layout;
}

Json LayoutDescriptor::to_json() const {
  Json out = Json::object();
  out.set("reshard_layout", kVersion).set("name", name);
  if (!description.empty()) out.set("description", description);
  if (mesh) {
    Json axes = Json::array();
    for (const MeshAxis& a : mesh->axes()) axes.push_back(Json::object().set("axis", a.name).set("size", a.size));
    out.set("mesh", std::move(axes));
  }
  out.set("files", stored_as == StoredAs::kWhole ? "whole" : "shards");
  Json rules = Json::array();
  for (const TensorRule& rule : tensors) rules.push_back(rule_json(rule));
  out.set("tensors", std::move(rules));
  if (vocabulary) out.set("vocabulary", vocabulary_json(*vocabulary));
  if (pipeline) out.set("pipeline", pipeline_json(*pipeline));
  if (kv_heads)
    out.set("kv_heads",
            Json::object().set("tensors", strings(kv_heads->tensors)).set("replication", kv_heads->replication));
  if (!evidence.empty()) {
    Json list = Json::array();
    for (const LayoutEvidence& e : evidence)
      list.push_back(Json::object().set("about", e.about).set("confidence", e.confidence).set("because", e.because));
    out.set("evidence", std::move(list));
  }
  if (!notes.empty()) out.set("notes", strings(notes));
  return out;
}

Result<LayoutDescriptor> LayoutDescriptor::with_mesh(Mesh given) const {
  if (mesh)
    return usage_error(shown(*this) + " already has the mesh " + mesh->to_string() + "; drop --mesh " +
                       given.to_string());
  LayoutDescriptor out = *this;
  out.mesh = std::move(given);
  if (auto fits = check(out); !fits)
    return usage_error(std::move(fits).error().context(shown(*this) + " on " + out.mesh->to_string()).message());
  return out;
}

Result<Placement> LayoutDescriptor::place(std::string_view tensor, const Dims& shape, Index layers) const {
  Placement placement = TRY(place_as_ruled(*this, tensor, shape, layers));
  TRY(check_rows(*this, tensor, shape));
  return placement;
}

Result<Placement> LayoutDescriptor::place_in_files(std::string_view tensor, const Dims& shape, Index layers) const {
  if (stored_as == StoredAs::kShards) return place(tensor, shape, layers);
  Placement placement = TRY(place_as_ruled(*this, tensor, shape, layers));
  placement.splits.clear();
  return placement;
}

Result<Index> LayoutDescriptor::padded_rows(Index rows) const {
  if (vocabulary->padded_size) return *vocabulary->padded_size;
  const Index size = vocabulary->size.value_or(rows);
  if (!vocabulary->divisible_by) return size;
  const auto padded = padded_vocabulary(size, *vocabulary->divisible_by, mesh->size("tp"));
  if (!padded) return usage_error(shown(*this) + ": " + with_commas(size) + " vocabulary rows are too many to pad");
  return *padded;
}

const BuiltinLayout* find_builtin_layout(std::string_view name) {
  for (const BuiltinLayout& layout : builtin_layouts())
    if (layout.name == name) return &layout;
  return nullptr;
}

std::string builtin_layout_names() {
  std::vector<std::string> names;
  for (const BuiltinLayout& layout : builtin_layouts()) names.emplace_back(layout.name);
  return join(names, ", ");
}

Result<LayoutDescriptor> load_layout(const std::string& name_or_file, const std::string& mesh) {
  constexpr Index kMaxLayoutFile = Index{16} << 20;
  LayoutDescriptor layout;
  if (const BuiltinLayout* builtin = find_builtin_layout(name_or_file)) {
    layout = TRY(LayoutDescriptor::parse(builtin->text, name_or_file));
  } else {
    if (!TRY(path_exists(name_or_file))) {
      std::vector<std::string> names;
      for (const BuiltinLayout& known : builtin_layouts()) names.emplace_back(known.name);
      return io_error(printable(name_or_file) + ": no such file or built-in layout; choose one of: " +
                      builtin_layout_names() + near_name(name_or_file, names));
    }
    layout = TRY(LayoutDescriptor::parse(TRY(read_whole_file(name_or_file, kMaxLayoutFile)), printable(name_or_file)));
  }
  if (mesh.empty()) return layout;
  return layout.with_mesh(TRY(Mesh::parse(mesh)));
}

}  // namespace reshard
