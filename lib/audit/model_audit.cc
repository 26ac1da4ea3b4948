#include "lib/audit/model_audit.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "lib/audit/vocabulary.h"
#include "lib/base/file.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/model/packing.h"

namespace reshard {
namespace {

constexpr std::size_t kShownLines = 6;

// How a shape differs from the one that was due.
enum class Difference {
  kPart,          // one dimension is 1/t of what it should be
  kReplicated,    // dimension 0 is a multiple: key-value heads that were repeated for tensor parallelism
  kConcatenated,  // dimension 0 is a multiple: experts of several ranks joined
  kTransposed,
  kOther,
};

struct Mismatch {
  const Parameter* parameter = nullptr;
  const Tensor* tensor = nullptr;
  Difference difference = Difference::kOther;
  int dim = -1;     // that differs
  Index times = 1;  // by this factor
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

// "[4096, 1024]"
std::string shapes_text(const Mismatch& m) {
  return to_string(m.tensor->shape) + " where " + to_string(m.parameter->shape) + " is due";
}

std::string leaf(std::string_view pattern) {
  for (const std::string_view suffix : {".weight"})
    if (pattern.ends_with(suffix)) pattern.remove_suffix(suffix.size());
  return std::string(pattern.substr(pattern.rfind('.') + 1));
}

std::string formula_text(const NameRule& rule, int dim, const ModelConfig& config) {
  return explain(split(rule.shape, ',')[static_cast<std::size_t>(dim)], config.numbers());
}

// A line for each parameter of the table among the mismatches, a few of them.
std::vector<std::string> lines_by_rule(const std::vector<Mismatch>& all) {
  std::map<const NameRule*, const Mismatch*> first;
  for (const Mismatch& m : all) first.emplace(m.parameter->rule, &m);
  std::vector<std::string> lines;
  for (const auto& [rule, m] : first) {
    if (lines.size() == kShownLines) {
      lines.push_back("and " + count_of(static_cast<Index>(first.size() - kShownLines), "other kind") + " of tensor");
      break;
    }
    lines.push_back(leaf(rule->hf) + ": " + shapes_text(*m) +
                    (m->dim >= 0 ? " (dim " + std::to_string(m->dim) + ")" : ""));
  }
  return lines;
}

std::string ranges(const std::set<Index>& numbers) {
  return join(runs_of({numbers.begin(), numbers.end()}, " to "), ", ");
}

class ModelAuditor {
 public:
  ModelAuditor(const Catalog& catalog, const Family& family, const ModelConfig& config)
      : catalog_(catalog), family_(family), config_(config) {}

  Result<ModelAudit> run() {
    expected_ = TRY(parameters(family_, config_));
    required_ = expected_.size();
    for (Parameter& p : TRY(prediction_parameters(family_, config_))) expected_.push_back(std::move(p));
    for (const Parameter& p : expected_) by_name_.emplace(p.name, &p);
    look_at_names();
    compare_shapes();
    report_vocabulary();
    report_parts();
    report_other_shapes();
    report_missing();
    report_extra();
    report_dtypes();
    look_at_optimizer();
    out_.findings = findings_.take();
    return std::move(out_);
  }

 private:
  // ---- names

  void look_at_names() {
    std::vector<std::string> unknown;
    for (const Tensor& tensor : catalog_.tensors()) {
      const StateKey key = split_state_key(tensor.name);
      if (key.kind != StateKind::kModel) continue;
      const auto parsed = parse_name(family_, key.parameter);
      if (!parsed) {
        look_at_unknown(tensor.name, unknown);
        continue;
      }
      ++out_.looked_at;
      if (parsed->rule->rows == Rows::kDropped) continue;
      if (parsed->is_packed()) {
        look_at_packed(tensor, *parsed);
        continue;
      }
      const std::string name = canonical_key(family_, key.parameter);
      const auto [it, is_new] = found_.emplace(name, &tensor);
      if (!is_new) report_duplicate(name, *it->second, tensor);
      if (!by_name_.contains(name)) extra_.emplace_back(*parsed, &tensor);
    }
    if (unknown.empty()) return;
    Finding& f = findings_.add(Severity::kWarning, "name-unknown");
    f.what = count_of(static_cast<Index>(unknown.size()), "tensor") + " whose name family " +
             std::string(family_.name) + " does not know";
    f.tensors = std::move(unknown);
    f.advice =
        "A head or an adapter of your own is carried with --keep-unknown; a misspelt name is a tensor that no "
        "loader will find.";
  }

  // Heads of reward and classification models stand where the language model has its own.
  void look_at_unknown(const std::string& name, std::vector<std::string>& unknown) {
    const bool is_head = name.starts_with("value_head.") || name.starts_with("score.");
    if (is_head)
      other_head_ = name.substr(0, name.find('.'));
    else
      unknown.push_back(name);
  }

  void report_duplicate(const std::string& name, const Tensor& a, const Tensor& b) {
    Finding& f = findings_.add(Severity::kError, "name-duplicate");
    f.tensors = {a.name, b.name};
    f.what = "both are " + name;
    f.why.push_back(a.shape == b.shape
                        ? "both have shape " + to_string(a.shape) + "; only one can be loaded"
                        : "their shapes contradict each other: " + to_string(a.shape) + " and " + to_string(b.shape));
    f.advice = "Find out which of them the training run updated; --exclude leaves the other out of a conversion.";
  }

  // A packed tensor stands for its parts.
  void look_at_packed(const Tensor& tensor, const ParsedName& parsed) {
    std::vector<Dims> shapes;
    std::vector<std::string> due;
    for (const std::string& part : part_names(parsed, config_.number("num_experts"))) {
      packed_.insert(part);
      const auto expected = by_name_.find(part);
      if (expected == by_name_.end()) continue;
      shapes.push_back(expected->second->shape);
      if (due.size() < 3) due.push_back(part + " " + to_string(shapes.back()));
    }
    if (shapes.empty()) {
      extra_.emplace_back(parsed, &tensor);
      return;
    }
    const auto shape = packed_shape(*parsed.stored, shapes);
    if (!shape || tensor.shape == *shape) return;
    Finding& f = findings_.add(Severity::kError, "shape-other");
    f.tensors = {tensor.name};
    f.what = to_string(tensor.shape) + " where " + to_string(*shape) + " is due";
    f.why.push_back(
        "it is made of " + join(due, ", ") +
        (shapes.size() > due.size() ? " and " + count_of(std::ssize(shapes) - std::ssize(due), "other") : ""));
  }

  // ---- shapes

  void compare_shapes() {
    for (const Parameter& p : expected_) {
      const auto found = found_.find(p.name);
      const bool is_required = static_cast<std::size_t>(&p - expected_.data()) < required_;
      if (!p.is_tied && is_required) {
        ++out_.expected_tensors;
        out_.expected_elements += volume(p.shape);
      }
      if (found == found_.end()) {
        if (packed_.contains(p.name)) continue;
        if (p.is_tied)
          out_.head_is_tied = true;
        else if (is_required)
          missing_.push_back(&p);
        continue;
      }
      if (found->second->shape != p.shape) mismatches_.push_back(classify(p, *found->second));
    }
  }

  // Whether its only fault is the number of words.
  static bool has_other_vocabulary(const Mismatch& m) {
    const Dims &want = m.parameter->shape, &got = m.tensor->shape;
    return m.parameter->rule->is_vocabulary() && got.rank() == want.rank() && got[0] != want[0] &&
           (want.rank() < 2 || got[1] == want[1]);
  }

  void report_vocabulary() {
    std::vector<VocabularyTensor> tensors;
    bool differs = false;
    for (const Parameter& p : expected_) {
      const auto found = found_.find(p.name);
      if (!p.rule->is_vocabulary() || found == found_.end() || found->second->shape.rank() != p.shape.rank()) continue;
      const Tensor& t = *found->second;
      const Index rows = t.shape[0];
      if (p.shape.rank() == 2 && t.shape[1] != p.shape[1]) continue;
      tensors.push_back({t.name, rows, rows > 0 ? t.bytes() / rows : 0});
      differs = differs || rows != p.shape[0];
    }
    if (!differs) return;
    VocabularyContext context{config_.path, config_.vocab_size(), config_.num_attention_heads(), false};
    context.optimizer_missing =
        base_name(catalog_.root) == "modeling" && !path_exists(path_join(parent_path(catalog_.root), "optimizer"));
    for (Finding& f : audit_vocabulary(tensors, context)) findings_.add(std::move(f));
    std::erase_if(mismatches_, has_other_vocabulary);
  }

  // Tensors that are one of t parts: of a rank's dump when tensor parallelism would cut them so, by mistake otherwise.
  void report_parts() {
    std::map<Index, std::vector<Mismatch>> as_due;
    std::map<std::pair<const NameRule*, int>, std::vector<Mismatch>> wrong;
    for (const Mismatch& m : mismatches_) {
      if (m.difference != Difference::kPart) continue;
      if (m.dim == m.parameter->rule->tp_dim)
        as_due[m.times].push_back(m);
      else
        wrong[{m.parameter->rule, m.dim}].push_back(m);
    }
    for (const auto& [t, list] : as_due) report_rank_part(t, list, as_due.size() == 1);
    for (const auto& [key, list] : wrong) report_wrong_part(list);
  }

  void report_rank_part(Index t, const std::vector<Mismatch>& list, bool consistent) {
    Finding& f = findings_.add(Severity::kError, "shape-part");
    for (const Mismatch& m : list) f.tensors.push_back(m.tensor->name);
    f.what = (list.size() == 1 ? "is" : "are") + std::string(" one of ") + std::to_string(t) + " tensor-parallel parts";
    f.why = lines_by_rule(list);
    Index cut = 0;
    for (const Parameter& p : expected_)
      cut += p.rule->tp_dim >= 0 && !p.rule->is_vocabulary() && found_.contains(p.name);
    f.why.push_back(!consistent ? "other tensors are parts of another number: this is no consistent tensor parallelism"
                    : static_cast<Index>(list.size()) == cut
                        ? "every tensor that tensor parallelism cuts is 1/" + std::to_string(t) +
                              " of its size: this is what one rank of tp=" + std::to_string(t) + " held"
                        : with_commas(static_cast<Index>(list.size())) + " of " + with_commas(cut) +
                              " tensors that tensor parallelism cuts, the others are whole");
    Index lost = 0;
    for (const Mismatch& m : list)
      lost += (volume(m.parameter->shape) - volume(m.tensor->shape)) * byte_size(m.tensor->dtype);
    f.lost = "Not here: " + std::to_string(t - 1) + " of " + std::to_string(t) + " parts (" + human_bytes(lost) + ").";
    f.advice = "If every rank wrote its own file, join the " + std::to_string(t) +
               " files in rank order. If only rank 0 wrote, save again with the tensors gathered.";
  }

  void report_wrong_part(const std::vector<Mismatch>& list) {
    const Mismatch& m = list[0];
    const NameRule& rule = *m.parameter->rule;
    const bool is_norm = m.parameter->shape.rank() == 1 && rule.tp_dim < 0;
    Finding& f = findings_.add(Severity::kError, is_norm           ? "shape-norm-cut"
                                                 : rule.tp_dim < 0 ? "shape-cut"
                                                                   : "shape-wrong-dimension");
    for (const Mismatch& x : list) f.tensors.push_back(x.tensor->name);
    f.what = shapes_text(m);
    f.why.push_back(formula_text(rule, m.dim, config_) + "; " + with_commas(m.tensor->shape[m.dim]) + " is 1/" +
                    std::to_string(m.times) + " of it");
    if (rule.tp_dim < 0)
      f.why.push_back(
          "tensor parallelism leaves this tensor whole on every rank; it was cut by mistake, or it is a "
          "shard of FSDP that was never gathered");
    else
      f.why.push_back("it is a part along dim " + std::to_string(m.dim) + "; a " +
                      (rule.tp_dim == 0 ? "column" : "row") + "-parallel tensor is cut along dim " +
                      std::to_string(rule.tp_dim) + ": column and row were confused");
    const Index lost = (volume(m.parameter->shape) - volume(m.tensor->shape)) * byte_size(m.tensor->dtype);
    f.lost = human_bytes(lost * static_cast<Index>(list.size())) + " are not here.";
    f.advice = "Look for the other " + count_of(m.times - 1, "part") + "; save again with the tensors gathered.";
  }

  void report_other_shapes() {
    std::map<std::pair<const NameRule*, Difference>, std::vector<Mismatch>> groups;
    for (const Mismatch& m : mismatches_)
      if (m.difference != Difference::kPart) groups[{m.parameter->rule, m.difference}].push_back(m);
    for (const auto& [key, list] : groups) {
      if (key.second == Difference::kConcatenated) {
        concatenated_.insert(concatenated_.end(), list.begin(), list.end());
        continue;
      }
      const Mismatch& m = list[0];
      Finding& f = findings_.add(Severity::kError, "shape-other");
      for (const Mismatch& x : list) f.tensors.push_back(x.tensor->name);
      f.what = shapes_text(m);
      explain_shape(m, f);
    }
    report_concatenated();
  }

  void explain_shape(const Mismatch& m, Finding& f) const {
    const NameRule& rule = *m.parameter->rule;
    if (m.difference == Difference::kTransposed) {
      f.id = "shape-transposed";
      f.why.push_back(
          "the two dimensions are exchanged: a Conv1D weight [in, out] saved as a Linear weight [out, in], or "
          "the other way round");
      f.advice = "No data are lost; transpose it.";
      return;
    }
    if (m.difference == Difference::kReplicated) {
      f.id = "shape-kv-heads";
      f.why.push_back(formula_text(rule, 0, config_) + " = " + with_commas(m.parameter->shape[0]) + "; " +
                      with_commas(m.tensor->shape[0]) + " is " + std::to_string(m.times) +
                      " times that: key-value heads were replicated for a tensor-parallel degree above " +
                      with_commas(config_.num_key_value_heads()) + " and not merged");
      f.advice = "No data are lost: keep one copy of each head, after a check that the copies agree.";
      return;
    }
    for (int d = 0; d < m.parameter->shape.rank(); ++d) {
      const std::string formula = formula_text(rule, d, config_), result = with_commas(m.parameter->shape[d]);
      f.why.push_back("dim " + std::to_string(d) + ": " + formula + (formula.ends_with(result) ? "" : " = " + result));
    }
    f.advice = "Another model's config, or another model's tensor: compare with the run's own config.";
  }

  void report_concatenated() {
    if (concatenated_.empty()) return;
    const Index experts = config_.number("num_experts"), ep = concatenated_[0].times;
    Finding& f = findings_.add(Severity::kError, "shape-experts-concatenated");
    for (const Mismatch& m : concatenated_) f.tensors.push_back(m.tensor->name);
    f.what = "hold " + std::to_string(ep) + " experts each, one below the other";
    f.why = lines_by_rule(concatenated_);
    const Index kept = experts / ep;
    if (ep * kept == experts) {
      f.why.push_back(with_commas(experts) + " experts over ep=" + std::to_string(ep) + " are " + with_commas(kept) +
                      " a rank: expert i holds the rows of experts i, i + " + with_commas(kept) +
                      (ep > 2 ? ", ..." : "") + ", in the order of the ranks");
      std::erase_if(missing_, [&](const Parameter* p) { return p->expert >= kept; });
    }
    f.why.push_back("this is what ColossalAI's MoE plugin writes unsharded (shard=False) under expert parallelism");
    f.advice = "No data are lost: split each into " + std::to_string(ep) + " blocks of rows.";
  }

  // ---- missing and extra

  void report_missing() {
    report_missing_head();
    report_missing_layers();
    std::vector<const Parameter*> experts, others;
    for (const Parameter* p : missing_) (p->rule->is_per_expert() ? experts : others).push_back(p);
    report_missing_tensors(experts, "missing-experts");
    report_missing_tensors(others, "missing-tensors");
  }

  void report_missing_tensors(const std::vector<const Parameter*>& list, std::string id) {
    if (list.empty()) return;
    Finding& f = findings_.add(Severity::kError, std::move(id));
    std::map<const NameRule*, Index> by_rule;
    Index bytes = 0;
    for (const Parameter* p : list) {
      f.tensors.push_back(p->name);
      bytes += volume(p->shape) * byte_size(model_dtype());
      ++by_rule[p->rule];
    }
    f.what = std::string(list.size() == 1 ? "is" : "are") + " missing, and " + config_.path + " describes " +
             (list.size() == 1 ? "it" : "them");
    for (const auto& [rule, n] : by_rule) {
      if (f.why.size() == kShownLines) {
        f.why.push_back("and " + count_of(static_cast<Index>(by_rule.size() - kShownLines), "kind") + " more");
        break;
      }
      f.why.push_back(leaf(rule->hf) + ": " + with_commas(n) + (rule->when.empty() ? "" : ", due because of ") +
                      std::string(rule->when));
    }
    if (list[0]->rule->is_per_expert()) add_expert_ranges(list, f);
    f.lost = count_of(static_cast<Index>(list.size()), "tensor") + ", " + human_bytes(bytes) + ", not in any file.";
  }

  void add_expert_ranges(const std::vector<const Parameter*>& list, Finding& f) const {
    std::set<Index> experts;
    for (const Parameter* p : list) experts.insert(p->expert);
    f.why.push_back("experts " + ranges(experts) + " of " + with_commas(config_.number("num_experts")) +
                    ": a rank of expert parallelism that did not write, if they are one run");
  }

  void report_missing_head() {
    const auto head = std::find_if(missing_.begin(), missing_.end(), [](const Parameter* p) {
      return p->rule->is_vocabulary() && p->rule->place == NameRule::Place::kLast;
    });
    if (head == missing_.end()) return;
    Finding& f = findings_.add(other_head_.empty() ? Severity::kError : Severity::kNote, "missing-head");
    f.tensors = {(*head)->name};
    if (other_head_.empty()) {
      f.what = "is missing, and " + config_.path + " does not tie it to the embedding";
      f.why.push_back("tie_word_embeddings is false: the head is a tensor of its own, " + to_string((*head)->shape));
      f.lost = "The head (" + human_bytes(volume((*head)->shape) * byte_size(model_dtype())) +
               "), unless the run did tie it: loaders would start it at random.";
      f.advice = "If the run tied its embeddings, set tie_word_embeddings to true in " + config_.path + ".";
    } else {
      f.what = "is absent: " + std::string(other_head_ == "score" ? "a classifier" : "a reward model") + " (" +
               other_head_ + " present), not an error";
    }
    missing_.erase(head);
  }

  void report_missing_layers() {
    std::map<Index, Index> due, gone;
    for (const Parameter& p : expected_)
      if (p.layer >= 0 && p.layer < config_.num_hidden_layers()) ++due[p.layer];
    for (const Parameter* p : missing_)
      if (p->layer >= 0) ++gone[p->layer];
    std::set<Index> layers;
    for (const auto& [layer, n] : gone)
      if (n == due[layer]) layers.insert(layer);
    if (layers.empty()) return;
    Finding& f = findings_.add(Severity::kError, "missing-layers");
    Index bytes = 0;
    for (const Parameter* p : missing_)
      if (layers.contains(p->layer)) {
        f.tensors.push_back(p->name);
        bytes += volume(p->shape) * byte_size(model_dtype());
      }
    f.what = (layers.size() == 1 ? "layer " : "layers ") + ranges(layers) + " of 0 to " +
             with_commas(config_.num_hidden_layers() - 1) + " " + (layers.size() == 1 ? "is" : "are") + " missing";
    f.why.push_back(config_.path + " says num_hidden_layers = " + with_commas(config_.num_hidden_layers()) +
                    "; nothing of " + (layers.size() == 1 ? "this layer" : "these layers") + " is stored");
    if (is_one_run(layers) && layers.size() > 1)
      f.why.push_back("they are one run: a pipeline stage that was not saved, or a file that was not copied, looks so");
    f.lost =
        with_commas(static_cast<Index>(f.tensors.size())) + " tensors, " + human_bytes(bytes) + ", not in any file.";
    f.advice = "Look for the files of the other pipeline stages; if num_hidden_layers is wrong, mend the config.";
    std::erase_if(missing_, [&](const Parameter* p) { return layers.contains(p->layer); });
  }

  static bool is_one_run(const std::set<Index>& numbers) {
    return *numbers.rbegin() - *numbers.begin() + 1 == static_cast<Index>(numbers.size());
  }

  void report_extra() {
    std::vector<std::string> beyond, unexpected;
    Index deepest = 0;
    for (const auto& [parsed, tensor] : extra_) {
      const bool is_beyond = parsed.layer >= config_.num_hidden_layers() + config_.num_prediction_layers();
      if (is_beyond) deepest = std::max(deepest, parsed.layer);
      if (is_beyond || parsed.layer < config_.num_hidden_layers())
        (is_beyond ? beyond : unexpected).push_back(tensor->name);
    }
    if (!beyond.empty()) {
      Finding& f = findings_.add(Severity::kError, "extra-layers");
      f.tensors = std::move(beyond);
      f.what = "belong to layers that the model has not";
      f.why.push_back(config_.path + " says num_hidden_layers = " + with_commas(config_.num_hidden_layers()) +
                      "; the files go up to layer " + with_commas(deepest));
      f.advice = "A loader drops them silently. Another model's config, or a config that was edited.";
    }
    if (unexpected.empty()) return;
    Finding& f = findings_.add(Severity::kWarning, "extra-tensors");
    f.what =
        unexpected.size() == 1 ? "is not part of this model by its config" : "are not part of this model by its config";
    f.tensors = std::move(unexpected);
    f.advice = "A loader drops what the config does not describe.";
  }

  // ---- dtypes

  DType model_dtype() const { return dtype_from_torch(config_.dtype).value_or(DType::kBFloat16); }

  void report_dtypes() {
    std::map<std::pair<std::string_view, std::string_view>, std::vector<std::string>> by_dtype;  // stored, due
    Index compared = 0;
    for (const Parameter& p : expected_) {
      const auto found = found_.find(p.name);
      if (found == found_.end() || p.dtype.empty()) continue;
      const std::string_view stored = info(found->second->dtype).torch_name;
      ++compared;
      if (stored != p.dtype) by_dtype[{stored, p.dtype}].push_back(found->second->name);
    }
    if (by_dtype.empty()) return;
    // Training keeps parameters in float32 and the config names what inference uses: ordinary when all of them do.
    if (by_dtype.size() == 1 && by_dtype.begin()->first.first == "float32" &&
        static_cast<Index>(by_dtype.begin()->second.size()) == compared) {
      out_.uniform_dtype = "float32";
      return;
    }
    for (auto& [dtypes, names] : by_dtype) {
      const auto& [stored, due] = dtypes;
      Finding& f = findings_.add(Severity::kWarning, "dtype");
      f.what = (names.size() == 1 ? "is " : "are ") + std::string(stored) + " where " +
               (due == config_.dtype ? config_.path + " says " : std::string(family_.title) + " has ") +
               std::string(due);
      f.why.push_back(with_commas(static_cast<Index>(names.size())) + " of " + with_commas(compared) + " tensors");
      f.tensors = std::move(names);
      f.advice = "convert --dtype brings all of them to one.";
    }
  }

  // ---- optimizer state

  void look_at_optimizer() {
    std::map<std::string, std::set<std::string>> have;  // state -> parameters that have it
    std::vector<std::string> orphans, wrong;
    const Tensor* first_wrong = nullptr;
    std::unordered_map<std::string_view, const Tensor*> model;
    for (const Tensor& t : catalog_.tensors())
      if (split_state_key(t.name).kind == StateKind::kModel) model.emplace(t.name, &t);
    for (const Tensor& t : catalog_.tensors()) {
      const StateKey key = split_state_key(t.name);
      if (key.kind != StateKind::kOptimizer || key.parameter.empty()) continue;
      const auto parameter = model.find(key.parameter);
      if (parameter == model.end()) {
        orphans.push_back(t.name);
        continue;
      }
      have[key.suffix].insert(key.parameter);
      const bool is_factored = key.suffix.ends_with("_row") || key.suffix.ends_with("_col");  // Adafactor
      if (t.shape.rank() == 0 || is_factored || t.shape == parameter->second->shape) continue;
      if (!first_wrong) first_wrong = &t;
      wrong.push_back(t.name);
    }
    if (first_wrong) report_optimizer_shapes(*first_wrong, std::move(wrong), model);
    if (!orphans.empty()) {
      Finding& f = findings_.add(Severity::kWarning, "optimizer-orphan");
      f.what = "belong to parameters that are not here";
      f.tensors = std::move(orphans);
    }
    report_uneven_state(have);
  }

  void report_optimizer_shapes(const Tensor& first, std::vector<std::string> names,
                               const std::unordered_map<std::string_view, const Tensor*>& model) {
    const StateKey key = split_state_key(first.name);
    Finding& f = findings_.add(Severity::kError, "optimizer-shape");
    f.tensors = std::move(names);
    f.what = to_string(first.shape) + " where the parameter has " + to_string(model.find(key.parameter)->second->shape);
    f.why.push_back("optimizer state of " + key.parameter + " has its parameter's shape, element by element");
    f.advice = "One of the two is a shard or padded; the audit of the parameter tells which.";
  }

  void report_uneven_state(const std::map<std::string, std::set<std::string>>& have) {
    std::set<std::string> all;
    for (const auto& [state, names] : have) all.insert(names.begin(), names.end());
    std::vector<std::string> absent;
    for (const auto& [state, names] : have)
      for (const std::string& name : all)
        if (!names.contains(name)) absent.push_back(name + state);
    if (absent.empty()) return;
    Finding& f = findings_.add(Severity::kWarning, "optimizer-missing");
    f.what = "optimizer state is missing, which other parameters have";
    f.tensors = std::move(absent);
    f.advice = "The optimizer starts these moments at zero when it resumes.";
  }

  const Catalog& catalog_;
  const Family& family_;
  const ModelConfig& config_;
  ModelAudit out_;
  FindingList findings_;

  std::vector<Parameter> expected_;  // what the config describes, then what it allows
  std::size_t required_ = 0;         // how many of them must be there
  std::unordered_map<std::string, const Parameter*> by_name_;
  std::unordered_map<std::string, const Tensor*> found_;  // by canonical name
  std::set<std::string> packed_;                          // canonical names that a fused projection holds
  std::vector<std::pair<ParsedName, const Tensor*>> extra_;
  std::vector<Mismatch> mismatches_, concatenated_;
  std::vector<const Parameter*> missing_;
  std::string other_head_;  // "value_head", "score"
};

}  // namespace

Result<ModelAudit> audit_model(const Catalog& catalog, const Family& family, const ModelConfig& config) {
  return ModelAuditor(catalog, family, config).run();
}

}  // namespace reshard
