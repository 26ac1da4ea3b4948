// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "lib/audit/metadata_audits.h"
#include "lib/audit/missing_audit.h"
#include "lib/audit/vocabulary.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/model/packing.h"
#include "lib/model/parameters.h"
#include "lib/model/parts.h"
#include "lib/model/quantization.h"
#include "lib/model/shapes.h"

namespace reshard {
namespace {

// How a shape differs from the expected one.
enum class Difference {
  kPart,          // one dimension is 1/t of what it should be
  kReplicated,    // dimension 0 is a multiple: key-value heads that were repeated for tensor parallelism
  kConcatenated,  // dimension 0 is a multiple: experts of several ranks concatenated
  kTransposed,
  kOther,
};

struct Mismatch {
  const Parameter* parameter = nullptr;
  const Tensor* tensor = nullptr;
  Difference difference = Difference::kOther;
  int dim = -1;     // the dimension that differs
  Index times = 1;  // the factor by which it differs
};

Mismatch classify(const Parameter& p, const Tensor& tensor) {
  Mismatch m{&p, &tensor};
  const Dims &want = p.shape, &got = tensor.shape;
  if (want.rank() != got.rank() || volume(got) == 0) return m;
  if (want.rank() == 2 && want[0] == got[1] && want[1] == got[0]) {
    m.difference = Difference::kTransposed;
    return m;
  }
  int differing = 0;
  for (int d = 0; d < want.rank(); ++d)
    if (want[d] != got[d]) {
      ++differing;
      m.dim = d;
    }
  if (differing != 1) return m;
  if (want[m.dim] % got[m.dim] == 0) {
    m.difference = Difference::kPart;
    m.times = want[m.dim] / got[m.dim];
  } else if (m.dim == 0 && got[0] % want[0] == 0) {
    m.times = got[0] / want[0];
    if (p.rule->is_per_expert()) m.difference = Difference::kConcatenated;
    if (p.rule->heads == "num_key_value_heads") m.difference = Difference::kReplicated;
  }
  return m;
}

// "shape [512, 128]; config.json expects [257, 64]"
std::string shapes_text(const Dims& stored, const Dims& expected) {
  return "shape " + to_string(stored) + "; config.json expects " + to_string(expected);
}
std::string shapes_text(const Mismatch& m) { return shapes_text(m.tensor->shape, m.parameter->shape); }

std::string formula_text(const Parameter& p, int dim, const ModelConfig& config) {
  const std::vector<std::string> formulas = split(p.rule->shape_in(config.layer_type(p.layer)), ',');
  return explain(formulas[dim], config.numbers());
}

// Returns a line for each parameter of the table among the mismatches, up to kShownKinds.
std::vector<std::string> lines_by_rule(const std::vector<Mismatch>& all) {
  std::map<const NameRule*, const Mismatch*> first;
  for (const Mismatch& m : all) first.emplace(m.parameter->rule, &m);
  std::vector<std::string> lines;
  for (const auto& [rule, m] : first) {
    if (lines.size() == kShownKinds) {
      lines.push_back("and " + count_of(first.size() - kShownKinds, "other kind") + " of tensor");
      break;
    }
    lines.push_back(leaf_of_rule(rule->hf) + ": " + shapes_text(*m) +
                    (m->dim >= 0 ? " (dim " + std::to_string(m->dim) + ")" : ""));
  }
  return lines;
}

// Tensors whose shape is not the expected one, by the kind of finding that explains them.
struct Mismatches {
  std::vector<Mismatch> vocabulary;  // only the number of tokens differs
  std::vector<Mismatch> parts;
  std::vector<Mismatch> concatenated;
  std::vector<Mismatch> flat;  // one-dimensional; if some are parts, also one-dimensional parameters that are parts
  std::vector<Mismatch> others;
  Index padded_rows = 0;  // of a vocabulary padded like Megatron's, if the writer does not record it
};

// ---- Names

// Two tensors that are the same parameter.
struct Duplicate {
  std::string parameter;
  const Tensor *a = nullptr, *b = nullptr;
};

std::string file_of(const DescribedModel& subject, const Tensor& t) {
  return t.fragments.empty() ? "no file" : subject.catalog.files[t.fragments.extent(0).file].path;
}

void report_duplicates(const DescribedModel& subject, const std::vector<Duplicate>& duplicates, FindingList& findings) {
  if (duplicates.empty()) return;
  Finding& f = findings.add(Severity::kError, "name-duplicate");
  const bool is_one = duplicates.size() == 1;
  f.what =
      is_one ? "both are " + duplicates[0].parameter
             : count_of(std::ssize(duplicates), "parameter") + ", each stored under two names; only one can be loaded";
  for (const Duplicate& d : duplicates) {
    f.tensors.insert(f.tensors.end(), {d.a->name, d.b->name});
    if (f.why.size() >= kShown) continue;
    std::string line = is_one ? "" : d.parameter + " is " + d.a->name + " and " + d.b->name + ", ";
    const std::string a = file_of(subject, *d.a), b = file_of(subject, *d.b);
    line += "in " + a + (a == b ? ": " : " and " + b + ": ");
    line += d.a->shape == d.b->shape
                ? "both " + to_string(d.a->shape)
                : "their shapes contradict each other, " + to_string(d.a->shape) + " and " + to_string(d.b->shape);
    f.why.push_back(std::move(line));
  }
  if (duplicates.size() > kShown)
    f.why.push_back("and " + with_commas(std::ssize(duplicates) - Index{kShown}) + " more like them");
  f.advice = "Find out which of them the training run updated. Add --exclude to leave the others out of a conversion.";
}

// Returns whether all sections of a parameter are present, or the tensor is not a section. Adds the section to `there`.
bool is_whole(const StoredRule& stored, std::set<std::size_t>& there) {
  there.insert(stored.section);
  return !stored.is_section() || there.size() == stored.section_count();
}

// Returns whether `rows` are the words and padding: the writer records as many words as the config has, so further rows
// are not words; or a writer of these names pads like this and loads it.
bool are_padded(const DescribedModel& subject, Index words, Index rows) {
  return rows > words && (subject.catalog.vocabulary == words ||
                          (info(subject.names).pads_vocabulary && !explain_padding(rows, words).empty()));
}

// Returns whether a tensor that is the transpose of `head` differs from it only by padded rows.
bool is_padded_head(const DescribedModel& subject, const Tensor& tensor, const ParsedName& parsed, Dims head) {
  const auto& axes = parsed.stored->axes;
  const auto words = std::find_if(axes.begin(), axes.end(), [](const StoredAxis& axis) { return axis.dim == 0; });
  if (!parsed.rule->is_vocabulary() || words == axes.end() || tensor.shape.rank() != std::ssize(axes)) return false;
  const Index rows = tensor.shape[static_cast<int>(words - axes.begin())];
  if (!are_padded(subject, head[0], rows)) return false;
  head[0] = rows;
  const auto shape = packed_shape(*parsed.stored, std::vector{head}, &subject.config);
  return shape && *shape == tensor.shape;
}

// Records a packed tensor as its parts.
void look_at_packed(const DescribedModel& subject, const Tensor& tensor, const ParsedName& parsed, StoredModel& stored,
                    FindingList& findings) {
  std::vector<Dims> shapes;
  std::vector<std::string> shown;
  for (const std::string& part : part_names(parsed, subject.config.number("num_experts"))) {
    if (is_whole(*parsed.stored, stored.sections[part])) stored.packed.insert(part);
    const auto expected = subject.by_name.find(part);
    if (expected == subject.by_name.end()) continue;
    shapes.push_back(expected->second->shape);
    if (shown.size() < 3) shown.push_back(part + " " + to_string(shapes.back()));
  }
  if (shapes.empty()) {
    stored.extra.emplace_back(parsed, &tensor);
    return;
  }
  const auto shape = packed_shape(*parsed.stored, shapes, &subject.config);
  if (!shape || tensor.shape == *shape || is_padded_head(subject, tensor, parsed, shapes.front())) return;
  Finding& f = findings.add(Severity::kError, "shape-other");
  f.tensors = {tensor.name};
  f.causes = {"config-other"};
  f.what = shapes_text(tensor.shape, *shape);
  f.why.push_back(
      "it consists of " + join(shown, ", ") +
      (shapes.size() > shown.size() ? " and " + count_of(std::ssize(shapes) - std::ssize(shown), "other") : ""));
}

StoredModel match_names(const DescribedModel& subject, ModelAudit& audit, FindingList& findings) {
  StoredModel out;
  std::vector<Duplicate> duplicates;
  const PackedWeights packed = find_packed(subject.catalog, &subject.config);
  for (std::size_t i = 0; i < subject.catalog.tensors().size(); ++i) {
    const Tensor& tensor = subject.catalog.tensors()[i];
    const StateKey key = split_state_key(tensor.key());
    if (key.kind != StateKind::kModel) continue;
    if (const PackedWeight* const weight = packed.of(i); weight && !is_known_to_families(weight->packing)) {
      out.packed.insert(canonical_key(subject.family, weight->name));
      ++audit.looked_at;
      continue;
    }
    const auto by_shape =
        parse_tensor(subject.family, key.parameter, tensor.shape, &subject.config, tensor_text(tensor.name));
    const auto parsed = by_shape ? *by_shape : parse_name(subject.family, key.parameter);
    if (!parsed) {
      // Reward and classification models have their head in place of the language model's.
      if (is_other_head(key.parameter))
        out.other_head = key.parameter.substr(0, key.parameter.find('.'));
      else if (!tensor.is_buffer && !is_adapter(key.parameter) &&  // audit_names() reports adapters
               !subject.family.carries(key.parameter))
        out.unknown.push_back(&tensor);
      continue;
    }
    ++audit.looked_at;
    if (parsed->rule->is_dropped()) continue;
    if (parsed->is_packed()) {
      look_at_packed(subject, tensor, *parsed, out, findings);
      continue;
    }
    const std::string name = canonical_key(subject.family, key.parameter);
    const auto [it, is_new] = out.found.emplace(name, &tensor);
    if (!is_new) duplicates.push_back({name, it->second, &tensor});
    if (!subject.by_name.contains(name)) out.extra.emplace_back(*parsed, &tensor);
  }
  report_duplicates(subject, duplicates, findings);
  return out;
}

// ---- Shapes

// Returns whether only the number of tokens differs.
bool has_other_vocabulary(const Mismatch& m) {
  const Dims &want = m.parameter->shape, &got = m.tensor->shape;
  return m.parameter->rule->is_vocabulary() && got.rank() == want.rank() && got[0] != want[0] &&
         (want.rank() < 2 || got[1] == want[1]);
}

bool is_padding(const DescribedModel& subject, const Mismatch& m) {
  return has_other_vocabulary(m) && are_padded(subject, m.parameter->shape[0], m.tensor->shape[0]);
}

// If a rank's flattened parameters are parts, its one-dimensional parameters are parts too: moves them to `flat`.
void take_flat_parts(Mismatches& all) {
  const auto is_part = [](const Mismatch& m) { return volume(m.tensor->shape) < volume(m.parameter->shape); };
  if (std::none_of(all.flat.begin(), all.flat.end(), is_part)) return;
  for (std::vector<Mismatch>* list : {&all.parts, &all.others}) {
    const auto is_flat = [&](const Mismatch& m) {
      return m.parameter->shape.rank() == 1 && m.tensor->shape.rank() == 1 && is_part(m);
    };
    std::copy_if(list->begin(), list->end(), std::back_inserter(all.flat), is_flat);
    std::erase_if(*list, is_flat);
  }
}

Mismatches compare_shapes(const DescribedModel& subject, const StoredModel& stored) {
  Mismatches out;
  for (const Parameter& p : subject.expected) {
    const Tensor* found = stored.find(p);
    if (!found || found->shape == p.shape || found->elements() == 0) continue;  // audit_names() reports empty ones
    if (p.is_scale && is_shape_of_scales(found->shape, p.shape)) continue;
    const Mismatch m = classify(p, *found);
    if (is_padding(subject, m)) {
      if (subject.catalog.vocabulary == 0) out.padded_rows = m.tensor->shape[0];
      continue;
    }
    (!p.is_scale && !explain_flat(found->shape, p.shape).empty() ? out.flat
     : has_other_vocabulary(m)                                   ? out.vocabulary
     : m.difference == Difference::kPart                         ? out.parts
     : m.difference == Difference::kConcatenated                 ? out.concatenated
                                                                 : out.others)
        .push_back(m);
  }
  take_flat_parts(out);
  return out;
}

Index missing_bytes(const std::vector<Mismatch>& list) {
  Index sum = 0;
  for (const Mismatch& m : list)
    sum += (volume(m.parameter->shape) - volume(m.tensor->shape)) * byte_size(m.tensor->dtype);
  return sum;
}

std::vector<std::string> names_of(const std::vector<Mismatch>& list) {
  std::vector<std::string> out;
  for (const Mismatch& m : list) out.push_back(m.tensor->name);
  return out;
}

void report_flat(const DescribedModel& subject, const std::vector<Mismatch>& flat, FindingList& findings) {
  if (flat.empty()) return;
  const auto is_part = [](const Mismatch& m) { return volume(m.tensor->shape) < volume(m.parameter->shape); };
  const auto parts = std::count_if(flat.begin(), flat.end(), is_part);
  Finding& f = findings.add(Severity::kError, "shape-flat");
  f.tensors = names_of(flat);
  f.what = std::string(flat.size() == 1 ? "has one dimension" : "have one dimension") +
           ", like parameters flattened by FSDP" + (parts > 0 ? ": one rank's parts" : "");
  std::map<const NameRule*, const Mismatch*> first;
  for (const Mismatch& m : flat) first.emplace(m.parameter->rule, &m);
  for (const auto& [rule, m] : first) {
    if (f.why.size() == kShownKinds) {
      f.why.push_back("and " + count_of(first.size() - kShownKinds, "other kind") + " of tensor");
      break;
    }
    const Index here = volume(m->tensor->shape), all = volume(m->parameter->shape);
    f.why.push_back(leaf_of_rule(rule->hf) + ": " + to_string(m->tensor->shape) + " is " +
                    (here == all       ? "all of"
                     : all % here == 0 ? "1/" + with_commas(all / here) + " of"
                                       : with_commas(here) + " of the " + count_of(all, "element") + " of") +
                    " " + to_string(m->parameter->shape));
  }
  if (parts == 0) {
    f.advice = "No data is lost: convert writes them in the shapes that " + subject.config.path + " gives.";
    return;
  }
  f.lost = human_bytes(missing_bytes(flat)) + " of them is missing.";
  f.advice =
      "Every rank has its own part: look for the other ranks' files, of the same step. If there are none, save "
      "again with full state_dicts (FSDP's StateDictType.FULL_STATE_DICT).";
}

void report_vocabulary(const DescribedModel& subject, const StoredModel& stored, const Mismatches& mismatches,
                       FindingList& findings) {
  if (mismatches.vocabulary.empty()) return;
  std::vector<VocabularyTensor> tensors;  // those that match are reported too
  for (const Parameter& p : subject.expected) {
    const Tensor* t = stored.find(p);
    if (!p.rule->is_vocabulary() || !t || t->shape.rank() != p.shape.rank()) continue;
    if (p.shape.rank() == 2 && t->shape[1] != p.shape[1]) continue;
    const Index rows = t->shape[0];
    tensors.push_back({t->name, rows, rows > 0 ? t->bytes() / rows : 0});
  }
  const VocabularyContext context{subject.config.path, subject.config.vocab_size(),
                                  subject.config.num_attention_heads(), subject.catalog.lacks_optimizer};
  for (Finding& f : audit_vocabulary(tensors, context)) findings.add(std::move(f));
}

void report_rank_part(const DescribedModel& subject, const StoredModel& stored, Index t,
                      const std::vector<Mismatch>& list, bool consistent, FindingList& findings) {
  Finding& f = findings.add(Severity::kError, "shape-part");
  f.tensors = names_of(list);
  f.what = (list.size() == 1 ? "is" : "are") + std::string(" one of ") + std::to_string(t) + " tensor-parallel parts";
  f.why = lines_by_rule(list);
  Index cut = 0;
  for (const Parameter& p : subject.expected) cut += p.rule->tp_dim >= 0 && !p.rule->is_vocabulary() && stored.find(p);
  f.why.push_back(
      !consistent ? "other tensors are divided by other factors, so this is not a consistent tensor parallelism"
      : std::ssize(list) == cut ? "every tensor that tensor parallelism cuts is 1/" + std::to_string(t) +
                                      " of its size: this is what one rank of tp=" + std::to_string(t) + " held"
                                : with_commas(std::ssize(list)) + " of " + count_of(cut, "tensor") +
                                      " that tensor parallelism cuts; the others are whole");
  f.lost = "Missing: " + std::to_string(t - 1) + " of " + std::to_string(t) + " parts (" +
           human_bytes(missing_bytes(list)) + ").";
  f.advice = "If every rank wrote its own file, join the " + count_of(t, "file") +
             " in rank order. If only rank 0 wrote, save again with the tensors gathered.";
}

void report_wrong_part(const DescribedModel& subject, const std::vector<Mismatch>& list, FindingList& findings) {
  const Mismatch& m = list[0];
  const NameRule& rule = *m.parameter->rule;
  const bool is_norm = m.parameter->shape.rank() == 1 && rule.tp_dim < 0;
  Finding& f = findings.add(Severity::kError, is_norm           ? "shape-norm-cut"
                                              : rule.tp_dim < 0 ? "shape-cut"
                                                                : "shape-wrong-dimension");
  f.tensors = names_of(list);
  f.what = shapes_text(m);
  f.why.push_back(formula_text(*m.parameter, m.dim, subject.config) + "; " + with_commas(m.tensor->shape[m.dim]) +
                  " is 1/" + std::to_string(m.times) + " of it");
  if (rule.tp_dim < 0)
    f.why.push_back(
        "tensor parallelism leaves this tensor whole on every rank: it was cut by mistake, or it is an "
        "FSDP shard that was never gathered");
  else
    f.why.push_back("it is a part along dim " + std::to_string(m.dim) + "; a " + (rule.tp_dim == 0 ? "column" : "row") +
                    "-parallel tensor is cut along dim " + std::to_string(rule.tp_dim) +
                    ": column and row were confused");
  f.lost = human_bytes(missing_bytes(list)) + " is missing.";
  f.advice = "Look for the other " + count_of(m.times - 1, "part") + "; save again with the tensors gathered.";
}

// Reports tensors that are one of t parts: one rank's dump if tensor parallelism would cut them like this, otherwise a
// mistake.
void report_parts(const DescribedModel& subject, const StoredModel& stored, const std::vector<Mismatch>& parts,
                  FindingList& findings) {
  std::map<Index, std::vector<Mismatch>> as_due;
  std::map<std::pair<const NameRule*, int>, std::vector<Mismatch>> wrong;
  for (const Mismatch& m : parts)
    (m.dim == m.parameter->rule->tp_dim ? as_due[m.times] : wrong[{m.parameter->rule, m.dim}]).push_back(m);
  for (const auto& [t, list] : as_due) report_rank_part(subject, stored, t, list, as_due.size() == 1, findings);
  for (const auto& [key, list] : wrong) report_wrong_part(subject, list, findings);
}

void explain_shape(const DescribedModel& subject, const Mismatch& m, Finding& f) {
  if (m.parameter->is_scale) {
    f.why.push_back("expected one scale per block of its matrix; quantization_config of " + subject.config.path +
                    " gives the block size");
    f.advice = "Scales of other blocks or of another model: without its own, the matrix is unusable.";
    return;
  }
  if (m.difference == Difference::kTransposed) {
    f.id = "shape-transposed";
    f.why.push_back(
        "the two dimensions are exchanged: a Conv1D weight [in, out] saved as a Linear weight [out, in], or "
        "vice versa");
    f.advice = "No data is lost; transpose it.";
    return;
  }
  if (m.difference == Difference::kReplicated) {
    f.id = "shape-kv-heads";
    f.why.push_back(formula_text(*m.parameter, 0, subject.config) + " = " + with_commas(m.parameter->shape[0]) + "; " +
                    with_commas(m.tensor->shape[0]) + " is " + std::to_string(m.times) +
                    " times that: key-value heads were replicated for a tensor-parallel degree above " +
                    with_commas(subject.config.num_key_value_heads()) + " and not merged");
    f.advice = "No data is lost: keep one copy of each head after you have checked that the copies are equal.";
    return;
  }
  for (int d = 0; d < m.parameter->shape.rank(); ++d) {
    const std::string formula = formula_text(*m.parameter, d, subject.config),
                      result = with_commas(m.parameter->shape[d]);
    f.why.push_back("dim " + std::to_string(d) + ": " + formula + (formula.ends_with(result) ? "" : " = " + result));
  }
  f.advice = "The config or the tensor belongs to another model: compare with the run's own config.";
}

void report_other_shapes(const DescribedModel& subject, const std::vector<Mismatch>& others, FindingList& findings) {
  std::map<std::pair<const NameRule*, Difference>, std::vector<Mismatch>> groups;
  for (const Mismatch& m : others) groups[{m.parameter->rule, m.difference}].push_back(m);
  for (const auto& [key, list] : groups) {
    Finding& f = findings.add(Severity::kError, "shape-other");
    f.tensors = names_of(list);
    f.what = shapes_text(list[0]);
    explain_shape(subject, list[0], f);
  }
}

// Returns how many experts' tensors are stored if each rank wrote its experts concatenated under the names of the first
// rank's; 0 if that is not the case.
Index experts_kept(const DescribedModel& subject, const std::vector<Mismatch>& concatenated) {
  const Index experts = subject.config.number("num_experts");
  return concatenated.empty() || experts % concatenated[0].times != 0 ? 0 : experts / concatenated[0].times;
}

void report_concatenated(const DescribedModel& subject, const std::vector<Mismatch>& list, FindingList& findings) {
  if (list.empty()) return;
  const Index ep = list[0].times, kept = experts_kept(subject, list);
  Finding& f = findings.add(Severity::kError, "shape-experts-concatenated");
  f.tensors = names_of(list);
  f.what = "hold " + count_of(ep, "expert") + " each, concatenated by rows";
  f.why = lines_by_rule(list);
  if (kept > 0)
    f.why.push_back(count_of(ep * kept, "expert") + " over ep=" + std::to_string(ep) + " are " + with_commas(kept) +
                    " per rank: expert i contains the rows of experts i, i + " + with_commas(kept) +
                    (ep > 2 ? ", ..." : "") + ", in the order of the ranks");
  f.why.push_back("this is what ColossalAI's MoE plugin writes unsharded (shard=False) under expert parallelism");
  f.advice = "No data is lost: split each into " + count_of(ep, "block") + " of rows.";
}

// ---- Another model's config

// A formula of the family's table, and the sizes that the tensors have instead.
struct FormulaSizes {
  std::set<Index> by_config, stored;
  Index tensors = 0;
  bool is_sure = false;  // whether some tensor differs in a way that no sharding explains
  // Rules whose tensors look cut along a dimension that tensor parallelism does not cut. If there are several, sharding
  // is not the reason.
  std::set<const NameRule*> cut_elsewhere;
};

std::string formula_of(const NameRule& rule, int dim) {
  std::string formula = split(rule.shape, ',')[dim];
  return formula.substr(std::min(formula.size(), formula.find_first_not_of(' ')));
}

// Returns the formulas whose result no tensor has, while all tensors agree on another value: "hidden_size" of a larger
// model's config.
std::map<std::string, FormulaSizes> contradicted(const DescribedModel& subject, const StoredModel& stored) {
  std::map<std::string, FormulaSizes> out;
  for (const Parameter& p : subject.expected) {
    const Tensor* t = stored.find(p);
    if (!t || t->elements() == 0 || p.is_scale || t->shape.rank() != p.shape.rank() ||
        std::ssize(split(p.rule->shape, ',')) != p.shape.rank())
      continue;
    const Mismatch m = t->shape == p.shape ? Mismatch() : classify(p, *t);
    const bool is_other = t->shape != p.shape && m.difference == Difference::kOther;
    for (int d = 0; d < p.shape.rank(); ++d) {
      FormulaSizes& said = out[formula_of(*p.rule, d)];
      said.by_config.insert(p.shape[d]);
      said.stored.insert(t->shape[d]);
      ++said.tensors;
      said.is_sure = said.is_sure || (is_other && t->shape[d] != p.shape[d]);
      if (m.difference == Difference::kPart && m.dim == d && d != p.rule->tp_dim) said.cut_elsewhere.insert(p.rule);
    }
  }
  std::erase_if(out, [](const auto& entry) {
    const FormulaSizes& s = entry.second;
    return !(s.is_sure || s.cut_elsewhere.size() > 2) || s.tensors < 2 || s.by_config.size() != 1 ||
           s.stored.size() != 1 || s.by_config == s.stored;
  });
  return out;
}

// Moves the mismatches that the contradicted formulas explain.
std::vector<Mismatch> take_explained(const std::map<std::string, FormulaSizes>& said, Mismatches& all) {
  std::vector<Mismatch> out;
  const auto is_explained = [&](const Mismatch& m) {
    const Dims &want = m.parameter->shape, &got = m.tensor->shape;
    if (m.parameter->is_scale || want.rank() != got.rank()) return false;
    bool is_said = false;
    for (int d = 0; d < want.rank(); ++d) {
      if (want[d] == got[d]) continue;
      if (said.contains(formula_of(*m.parameter->rule, d)))
        is_said = true;
      else if (d != 0 || !m.parameter->rule->is_vocabulary())
        return false;
    }
    return is_said;
  };
  for (std::vector<Mismatch>* list : {&all.parts, &all.concatenated, &all.others}) {
    std::copy_if(list->begin(), list->end(), std::back_inserter(out), is_explained);
    std::erase_if(*list, is_explained);
  }
  return out;
}

// Reports a config of another model. If it returns true, the caller reports nothing else about the config.
bool report_other_config(const DescribedModel& subject, const std::map<std::string, FormulaSizes>& said,
                         const std::vector<Mismatch>& explained, FindingList& findings) {
  if (explained.empty()) return false;
  Finding& f = findings.add(Severity::kError, "config-other");
  f.what = subject.config.path + " belongs to another model: ";
  std::vector<std::string> numbers;
  for (const auto& [formula, s] : said) {
    const std::string text = explain(formula, subject.config.numbers());
    numbers.push_back(
        text + (text.ends_with(with_commas(*s.by_config.begin())) ? "" : " = " + with_commas(*s.by_config.begin())) +
        ", and " + count_of(s.tensors, "tensor") + " of the checkpoint " + (s.tensors == 1 ? "has " : "have ") +
        with_commas(*s.stored.begin()));
  }
  f.what += numbers[0];
  f.why.assign(numbers.begin() + 1, numbers.end());
  f.why.push_back(count_of(std::ssize(explained), "tensor") + (explained.size() == 1 ? " differs" : " differ") +
                  " for this reason");
  f.advice = "Add --config with the config.json of the run itself.";
  return true;
}

// ---- Dtypes

// Returns whether the checkpoint stores other values than the parameter's, in float32 because rounding them would lose
// bits of the parameter: MaxText's Gemma norms, which have 1 added.
bool is_changed_in_float32(const DescribedModel& subject, const Parameter& p, std::string_view dtype) {
  if (dtype != "float32" || !p.rule) return false;
  const StoredRule* const stored = stored_rule(subject.family, *p.rule, subject.names);
  return stored && stored->change.kind != ValueChange::Kind::kNone;
}

// Reports dtypes that differ from the config's. Returns ModelAudit::uniform_dtype.
std::string report_dtypes(const DescribedModel& subject, const StoredModel& stored, FindingList& findings) {
  std::map<std::pair<std::string_view, std::string_view>, std::vector<std::string>>
      by_dtype;  // keyed by stored and expected dtype
  Index compared = 0, in_float32 = 0;
  for (const Parameter& p : subject.expected) {
    const Tensor* found = stored.find(p);
    if (!found || p.dtype.empty()) continue;
    const std::string_view dtype = info(found->model_dtype.value_or(found->dtype)).torch_name;
    ++compared;
    in_float32 += dtype == "float32";
    if (subject.config.float8 && subject.config.float8->is_chosen && dtype == "float8_e4m3fn") continue;
    if (is_changed_in_float32(subject, p, dtype)) continue;
    // A parameter that transformers keeps in float32 may have been converted with the rest of the model.
    if (dtype != p.dtype && dtype != subject.config.dtype) by_dtype[{dtype, p.dtype}].push_back(found->name);
  }
  // Training keeps all parameters in float32 while the config names the dtype for inference, which is normal.
  if (!by_dtype.empty() && in_float32 == compared) return "float32";
  for (auto& [dtypes, names] : by_dtype) {
    const auto& [dtype, expected] = dtypes;
    Finding& f = findings.add(Severity::kWarning, "dtype");
    f.what = (names.size() == 1 ? "is " : "are ") + std::string(dtype) + "; " +
             (expected == subject.config.dtype ? subject.config.path + " expects "
                                               : std::string(subject.family.title) + " expects ") +
             std::string(expected);
    f.why.push_back(with_commas(std::ssize(names)) + " of " + count_of(compared, "tensor"));
    f.tensors = std::move(names);
    f.advice = "convert --dtype " + (subject.config.dtype.empty() ? "float32" : subject.config.dtype) +
               " converts them. Parameters that transformers keeps in float32 stay float32.";
  }
  return {};
}

}  // namespace

Result<ModelAudit> audit_model(const Catalog& catalog, const Model& model) {
  const Family& family = *model.family;
  const ModelConfig& config = *model.config;
  std::vector<Parameter> expected = TRY(parameters(family, config));
  DescribedModel subject{catalog, family, config, model.convention, std::move(expected), 0, {}};
  subject.required = subject.expected.size();
  for (Parameter& p : TRY(optional_parameters(family, config))) subject.expected.push_back(std::move(p));
  for (const Parameter& p : subject.expected) subject.by_name.emplace(p.name, &p);

  ModelAudit audit;
  FindingList findings;
  const StoredModel stored = match_names(subject, audit, findings);
  for (const Parameter& p : subject.expected) {
    audit.head_is_tied = audit.head_is_tied || (p.is_tied && !stored.find(p) && !stored.packed.contains(p.name));
    if (p.is_tied || !subject.requires_it(p)) continue;
    ++audit.expected_tensors;
    audit.expected_elements += volume(p.shape);
  }
  Mismatches mismatches = compare_shapes(subject, stored);
  const auto said = contradicted(subject, stored);
  const bool is_other = report_other_config(subject, said, take_explained(said, mismatches), findings);
  audit.padded_rows = mismatches.padded_rows;
  report_flat(subject, mismatches.flat, findings);
  report_vocabulary(subject, stored, mismatches, findings);
  report_parts(subject, stored, mismatches.parts, findings);
  report_other_shapes(subject, mismatches.others, findings);
  report_concatenated(subject, mismatches.concatenated, findings);
  audit_missing(subject, stored, experts_kept(subject, mismatches.concatenated), findings);
  audit.uniform_dtype = report_dtypes(subject, stored, findings);
  audit.findings = findings.take();
  for (Finding& f : audit.findings)
    if (is_other && f.id != "config-other" && f.id != "name-duplicate" && !f.id.starts_with("shape-"))
      f.causes.emplace_back("config-other");
  return audit;
}

}  // namespace reshard
