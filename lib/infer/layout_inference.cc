// SPDX-License-Identifier: Apache-2.0
#include "lib/infer/layout_inference.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"
#include "lib/layout/padded_vocabulary.h"

namespace reshard {
namespace {

// The names of tensors whose rows are the vocabulary in different trainers: the last component before ".weight".
constexpr std::array<std::string_view, 7> kVocabularyNames = {
    "tok_embeddings", "embed_tokens", "word_embeddings", "wte", "lm_head", "output", "output_layer"};

std::string of_n(Index n, std::string_view noun, std::string_view plural) {
  return with_commas(n) + " " + std::string(n == 1 ? noun : plural);
}

bool is_vocabulary(const Tensor& tensor) {
  const StateKey key = split_state_key(tensor.key());
  if (key.kind != StateKind::kModel || tensor.shape.rank() != 2) return false;
  std::string_view name = key.parameter;
  if (!name.ends_with(".weight")) return false;
  name.remove_suffix(std::string_view(".weight").size());
  name.remove_prefix(name.rfind('.') + 1);  // npos + 1 is 0
  return std::find(kVocabularyNames.begin(), kVocabularyNames.end(), name) != kVocabularyNames.end();
}

// The parts of a name around its first numeric component: "layers.", 12.
struct Layered {
  std::string prefix;
  std::string number;
};
std::optional<Layered> take_layer(const std::string& name) {
  Layered out;
  const std::vector<std::string> parts = split(name, '.');
  for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
    out.number = parts[i];
    if (as_number(parts[i])) return out;
    out.prefix += parts[i] + ".";
  }
  return std::nullopt;
}

std::vector<std::string> patterns_of(std::vector<std::string> names) {
  for (std::string& name : names) name = glob_escaped(name);
  return fold_names(names);
}

class Writer {
 public:
  Writer(const Catalog& catalog, const InferredMesh& inferred, const std::string& name)
      : catalog_(catalog), inferred_(inferred), name_(name) {}

  LayoutDescriptor write(const Mesh& mesh, const TensorPlacements& placed, bool is_first) {
    out_ = {};
    out_.name = name_;
    out_.mesh = mesh;
    placed_ = &placed;
    describe_axes(is_first);
    describe_tensors();
    describe_vocabulary();
    if (mesh.size("pp") > 1) describe_stages();
    for (const std::string& note : inferred_.notes) out_.notes.push_back(note);
    return std::move(out_);
  }

 private:
  void add_evidence(std::string about, Confidence confidence, std::string because) {
    out_.evidence.push_back({std::move(about), std::string(confidence_name(confidence)), std::move(because)});
  }

  void describe_axes(bool is_first) {
    if (!is_first) {
      add_evidence(out_.mesh->to_string(), Confidence::kLikely,
                   "explains the boxes and their writers as well as " + inferred_.hypotheses[0].to_string());
      return;
    }
    for (const InferredAxis& axis : inferred_.axes)
      add_evidence(axis.name + (axis.size > 0 ? "=" + std::to_string(axis.size) : " unknown"), axis.confidence,
                   axis.evidence);
    if (inferred_.axes.empty() && inferred_.ranks == 1)
      add_evidence("one rank", Confidence::kCertain, "one rank's files, nothing is cut");
  }

  // Returns the splits of a placement without axes that the mesh lacks.
  std::vector<Split> splits_of(const Placement& placement) const {
    std::vector<Split> out;
    for (Split s : placement.splits) {
      std::erase_if(s.axes, [&](const std::string& axis) { return out_.mesh->size(axis) == 1; });
      if (!s.axes.empty()) out.push_back(std::move(s));
    }
    return out;
  }

  void describe_tensors() {
    struct Group {
      std::vector<Split> splits;
      std::vector<std::string> names;
      Index boxes = 0;
    };
    std::vector<Group> groups;
    std::vector<std::string> unexplained;
    for (std::size_t i = 0; i < catalog_.tensors().size(); ++i) {
      const Tensor& tensor = catalog_.tensors()[i];
      const Placement* placement = placed_->find(i);
      if (!placement) {
        unexplained.push_back(tensor.name);
        continue;
      }
      std::vector<Split> splits = splits_of(*placement);
      auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.splits == splits; });
      if (group == groups.end()) group = groups.insert(group, {std::move(splits), {}, 0});
      group->names.push_back(tensor.name);
      group->boxes += std::ssize(tensor.fragments);
    }
    bool is_cut = !unexplained.empty();
    std::optional<std::vector<Split>> rest;
    for (Group& group : groups) {
      explain(group.splits.empty(), std::ssize(group.names), group.boxes);
      is_cut = is_cut || !group.splits.empty();
      // No pattern matches only the empty name, so a last rule covers what no other matches.
      if (std::erase(group.names, "") > 0) rest = group.splits;
      if (!group.names.empty()) out_.tensors.push_back({patterns_of(std::move(group.names)), std::move(group.splits)});
    }
    if (rest) out_.tensors.push_back({{"*"}, *std::move(rest)});
    out_.stored_as = is_cut ? StoredAs::kShards : StoredAs::kWhole;
    if (!unexplained.empty())
      out_.notes.push_back("No rule covers " +
                           of_n(std::ssize(unexplained), "tensor that is sharded", "tensors that are sharded") +
                           " differently: " + folded(unexplained) + ".");
  }

  void explain(bool is_whole, Index tensors, Index boxes) {
    const std::string about = "tensors[" + std::to_string(out_.tensors.size()) + "]";
    const std::string count = of_n(tensors, "tensor", "tensors");
    if (is_whole) {
      const bool is_certain = inferred_.ranks == 1;
      add_evidence(about, is_certain ? Confidence::kCertain : Confidence::kLikely,
                   count + (is_certain ? "" : ", stored in one piece: every rank has all of it"));
      return;
    }
    const bool writers_known = inferred_.ranks > 0;
    const bool is_certain = writers_known && inferred_.hypotheses.size() == 1;
    add_evidence(about, is_certain ? Confidence::kCertain : Confidence::kLikely,
                 count + ", " + of_n(boxes, "box", "boxes") +
                     (writers_known ? ", each written by an owner" : "; the file names do not tell the writers"));
  }

  void describe_vocabulary() {
    std::vector<const Tensor*> tensors;
    for (const Tensor& t : catalog_.tensors())
      if (is_vocabulary(t)) tensors.push_back(&t);
    if (tensors.empty()) return;
    std::vector<std::string> names, rows;
    std::set<Index> sizes;
    for (const Tensor* t : tensors) {
      names.push_back(t->name);
      rows.push_back(printable(t->name) + " has " + with_commas(t->shape[0]));
      sizes.insert(t->shape[0]);
    }
    Vocabulary v;
    v.tensors = patterns_of(std::move(names));
    if (sizes.size() > 1) {
      add_evidence("vocabulary", Confidence::kUnknown, join(rows, ", ") + " rows, which differ");
    } else {
      const Index size = *sizes.begin();
      if (size > 0) v.padded_size = size;
      add_evidence("vocabulary", is_multiple(size) ? Confidence::kUnknown : Confidence::kLikely, padding_text(size));
    }
    out_.vocabulary = std::move(v);
  }

  bool is_multiple(Index rows) const { return rows % (kUsualMultiples.front().multiple * out_.mesh->size("tp")) == 0; }

  // Says whether the rows could include padding; only a config or a tokenizer can tell.
  std::string padding_text(Index rows) const {
    const Index tp = out_.mesh->size("tp");
    std::vector<std::string> fits;
    for (const auto& [multiple, framework] : kUsualMultiples)
      if (!framework.empty() && rows % (multiple * tp) == 0)
        fits.push_back(std::to_string(multiple) + (tp > 1 ? " x tp " + std::to_string(tp) : "") + " x " +
                       with_commas(rows / (multiple * tp)));
    const std::string unit = tp > 1 ? " times tp " + std::to_string(tp) : "";
    if (fits.empty()) return with_commas(rows) + " is not a multiple of 64 or 128" + unit + ", so padding is unlikely";
    return with_commas(rows) + " = " + join(fits, " = ") +
           ": padded to this multiple or by chance; only config.json or the tokenizer can tell";
  }

  void describe_stages() {
    std::map<std::pair<std::string, std::string>, Index> stage_of_layer;  // -1: the layer is in several stages
    const auto stage_of = [&](std::size_t i) {
      const Placement* placement = placed_->find(i);
      return placement ? placement->stage : Index{-1};
    };
    for (std::size_t i = 0; i < catalog_.tensors().size(); ++i) {
      const auto layered = take_layer(catalog_.tensors()[i].name);
      if (!layered) continue;
      const auto [it, is_new] = stage_of_layer.emplace(std::pair(layered->prefix, layered->number), stage_of(i));
      if (!is_new && it->second != stage_of(i)) it->second = -1;
    }
    std::vector<std::vector<std::string>> names(out_.mesh->size("pp"));
    for (std::size_t i = 0; i < catalog_.tensors().size(); ++i) {
      const std::string& name = catalog_.tensors()[i].name;
      const auto layered = take_layer(name);
      if (layered && stage_of_layer.at({layered->prefix, layered->number}) >= 0) continue;
      if (stage_of(i) >= 0) names[stage_of(i)].push_back(glob_escaped(name));
    }
    for (const auto& [layer, stage] : stage_of_layer)
      if (stage >= 0) names[stage].push_back(glob_escaped(layer.first) + layer.second + ".*");
    Pipeline p;
    for (const auto& stage : names) p.stages.push_back(fold_names(stage));
    out_.pipeline = std::move(p);
  }

  const Catalog& catalog_;
  const InferredMesh& inferred_;
  const std::string& name_;
  const TensorPlacements* placed_ = nullptr;
  LayoutDescriptor out_;
};

}  // namespace

Result<std::vector<LayoutDescriptor>> infer_layouts(const Catalog& catalog, const InferredMesh& inferred,
                                                    const std::string& name) {
  for (const Tensor& t : catalog.tensors())
    if (!is_utf8(t.name))
      return unsupported(catalog.where() + ": " + tensor_text(t.name) +
                         ": the name is not UTF-8, which a layout file cannot express");
  std::vector<LayoutDescriptor> out;
  Writer writer(catalog, inferred, name);
  for (std::size_t h = 0; h < inferred.hypotheses.size(); ++h)
    out.push_back(writer.write(inferred.hypotheses[h], inferred.placed[h], h == 0));
  if (out.empty()) {
    TensorPlacements all_whole{{Placement()}, {}};
    for (const std::string& placement : inferred.placements)
      all_whole.of_tensor.push_back(placement == "whole" || placement == "empty" ? 0 : -1);
    out.push_back(writer.write(Mesh(), all_whole, true));
  }
  for (const LayoutDescriptor& layout : out) TRY(LayoutDescriptor::parse(to_text(layout.to_json()), catalog.root));
  return out;
}

}  // namespace reshard
