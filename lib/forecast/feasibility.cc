// SPDX-License-Identifier: Apache-2.0
#include "lib/forecast/feasibility.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <set>

#include "lib/base/text.h"
#include "lib/layout/padded_vocabulary.h"
#include "lib/layout/stages.h"
#include "lib/model/class_family.h"

namespace reshard {
namespace {

constexpr std::string_view kDp = "dp", kDpShard = "dp_shard", kEp = "ep";
// The order in which changes of a degree are proposed: those that do not affect the model's tensors first.
constexpr std::array<std::string_view, 5> kProposed = {"dp_shard", "dp_replicate", "cp", "pp", "tp"};

std::string degree_text(std::string_view axis, Index size) { return std::string(axis) + "=" + std::to_string(size); }

// ---- The model's tensors, grouped by rule

struct RuleTensors {
  const NameRule* rule = nullptr;
  Dims shape;
  std::vector<std::string> names;

  bool is_cut() const { return rule->tp_dim >= 0 && rule->tp_dim < shape.rank(); }
  // Returns what tensor parallelism divides: the extent of each section along its dimension.
  Index section() const { return shape[rule->tp_dim] / std::max<Index>(1, rule->sections); }
};

// Groups parameters in the table's order, without scales and tied tensors.
std::vector<RuleTensors> by_rule(const std::vector<Parameter>& parameters) {
  std::vector<RuleTensors> out;
  std::map<const NameRule*, std::size_t> places;
  for (const Parameter& p : parameters) {
    if (p.is_scale || p.is_tied) continue;
    const auto [place, is_new] = places.emplace(p.rule, out.size());
    if (is_new) out.push_back({p.rule, p.value_shape(), {}});
    out[place->second].names.push_back(p.name);
  }
  return out;
}

void append(std::vector<std::string>& to, const std::vector<std::string>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

// Returns the last component of a name that is not "weight" or "bias": "k_proj".
std::string short_name(const RuleTensors& t) {
  const std::vector<std::string> parts = split(t.names.front(), '.');
  return parts.size() < 2 ? t.names.front() : parts[parts.size() - 2] + "." + parts.back();
}

// Returns "1/2 of a head", "2 heads" or "1 1/3 heads".
std::string heads_text(Index numerator, Index denominator) {
  const Index whole = numerator / denominator, rest = numerator % denominator;
  const Index common = std::gcd(rest, denominator);
  const std::string part = std::to_string(rest / common) + "/" + std::to_string(denominator / common);
  if (rest == 0) return count_of(whole, "head");
  return whole == 0 ? part + " of a head" : std::to_string(whole) + " " + part + " heads";
}

// ---- The audit

class Audit {
 public:
  Audit(const Family& family, const ModelConfig& config, const FeasibilityRequest& request)
      : family_(family), config_(config), request_(request) {}

  Result<Feasibility> run() {
    ModelConfig loaded = config_;
    if (request_.memory.weights) loaded.dtype = info(*request_.memory.weights).torch_name;
    out_.parameters = TRY(parameters(family_, loaded));
    out_.elements = count_elements(out_.parameters);
    rules_ = by_rule(out_.parameters);
    check_world();
    check_heads();
    check_parts();
    check_vocabulary();
    check_stages();
    check_experts();
    check_shards();
    check_sequence();
    const bool can_be_placed = size("pp") <= config_.num_hidden_layers() + 2 && expert_sharding(degrees());
    if (can_be_placed)
      out_.stages = stage_memory(out_.parameters, config_.num_hidden_layers(), degrees(), request_.memory);
    return std::move(out_);
  }

  // Returns the first error of the model with these degrees, whatever the number of ranks; empty if there is none.
  std::string first_error(std::vector<RuleTensors> rules) {
    rules_ = std::move(rules);
    check_heads();
    check_parts();
    check_stages();
    check_experts();
    check_sequence();
    for (const Finding& f : out_.findings)
      if (f.severity == Severity::kError) return f.what;
    return {};
  }

 private:
  const Degrees& degrees() const { return request_.degrees; }
  Index size(std::string_view axis) const { return degrees().size(axis); }
  std::string number_text(std::string_view name) const {
    return std::string(name) + " = " + with_commas(config_.number(name));
  }
  CheckRun& begin(std::string id, std::string title, Index looked_at) {
    return out_.checks.emplace_back(CheckRun{std::move(id), std::move(title), looked_at, {}});
  }
  static void skip(CheckRun& check, std::string why) {
    check.looked_at = 0;
    check.skipped = std::move(why);
  }
  void find(Finding finding) { out_.findings.push_back(std::move(finding)); }

  // Returns the degree by which this rule's sections are cut: tp, unless ep takes all ranks of experts.
  Index tp_of(const NameRule& rule) const {
    const auto experts = expert_sharding(degrees());
    return rule.is_per_expert() && experts && !experts->is_cut_by_tp ? 1 : size("tp");
  }

  // ---- Ranks

  void check_world() {
    CheckRun& check = begin("world-size", "the degrees multiply to the number of ranks", 1);
    if (!request_.world) return skip(check, "no --world");
    const Index ranks = degrees().mesh.ranks(), world = *request_.world;
    if (ranks == world) return;
    Finding f;
    f.id = "world-size";
    f.what = "the degrees multiply to " + count_of(ranks, "rank") + ", but --world is " + with_commas(world);
    std::vector<std::string> factors;
    for (const MeshAxis& axis : degrees().mesh.axes()) factors.push_back(axis.name + " " + std::to_string(axis.size));
    f.why.push_back((factors.empty() ? "no degree is given" : join(factors, " x ") + " = " + with_commas(ranks)) +
                    (world % ranks == 0   ? ": 1/" + with_commas(world / ranks) + " of " + with_commas(world)
                     : ranks % world == 0 ? ": " + with_commas(ranks / world) + " times " + with_commas(world)
                                          : ""));
    f.advice = other_degrees(world, f.why);
    find(std::move(f));
  }

  // Proposes single changes of degrees that multiply to `world`. Those that do not fit the model become reasons.
  std::string other_degrees(Index world, std::vector<std::string>& why) const {
    std::vector<std::string> fits;
    for (const std::string_view axis : kProposed) {
      if (size(axis) == 1 && axis != kDpShard) continue;
      const Index others = degrees().mesh.ranks() / size(axis);
      if (world % others != 0) continue;
      const std::string proposal = degree_text(axis, world / others);
      const std::string error = error_with(axis, world / others);
      if (error.empty())
        fits.push_back(proposal + (size(axis) > 1 ? " instead of " + std::to_string(size(axis)) : ""));
      else
        why.push_back(proposal + " would give " + count_of(world, "rank") + ", but does not fit the model: " + error);
    }
    if (!fits.empty()) return "With the other degrees unchanged, this fits: " + join(fits, ", or ") + ".";
    const Index others = degrees().mesh.ranks() / size(kDpShard), fewer = world / others;
    std::vector<std::string> worlds;
    for (const Index n : {fewer, fewer + 1})
      if (n > 0) worlds.push_back(with_commas(n * others) + " with " + degree_text(kDpShard, n));
    return "No single change fits. The nearest numbers of ranks with the other degrees: " + join(worlds, ", and ") +
           ".";
  }

  // Returns the first error of the model if one degree is changed.
  std::string error_with(std::string_view axis, Index degree) const {
    FeasibilityRequest changed = request_;
    std::vector<MeshAxis> axes;
    for (const std::string_view name : kMeshAxes)
      if (const Index n = name == axis ? degree : degrees().mesh.size(name); n > 1)
        axes.push_back({std::string(name), n});
    changed.degrees.mesh = Mesh(std::move(axes));
    return Audit(family_, config_, changed).first_error(rules_);
  }

  // ---- Tensor parallelism

  bool fits_tp(Index tp) const {
    return std::all_of(rules_.begin(), rules_.end(), [&](const RuleTensors& t) {
      if (!t.is_cut() || t.rule->is_vocabulary() || tp_of(*t.rule) == 1) return true;
      return t.section() % tp == 0 && (t.rule->heads.empty() || config_.number(t.rule->heads) % tp == 0);
    });
  }
  std::string largest_tp() const {
    Index best = size("tp");
    while (best > 1 && !fits_tp(best)) --best;
    return "The largest tp up to this one that fits: " + std::to_string(best) + ".";
  }

  // Attention heads must stay whole: norms, rotations and scores are computed over a whole head.
  void check_heads() {
    std::map<std::string_view, std::vector<const RuleTensors*>> by_heads;
    Index looked_at = 0;
    for (const RuleTensors& t : rules_) {
      if (!t.is_cut() || t.rule->heads.empty() || config_.number(t.rule->heads) < 1) continue;
      by_heads[t.rule->heads].push_back(&t);
      looked_at += std::ssize(t.names);
    }
    begin("heads", "tensor parallelism gives every rank whole attention heads", looked_at);
    for (const auto& [heads, tensors] : by_heads)
      if (config_.number(heads) % size("tp") != 0) find(cut_heads(heads, tensors));
  }

  Finding cut_heads(std::string_view name, const std::vector<const RuleTensors*>& tensors) const {
    const Index tp = size("tp"), heads = config_.number(name);
    Finding f;
    f.id = tp > heads ? "heads-exceeded" : "heads-uneven";
    f.what = degree_text("tp", tp) + (tp > heads ? " exceeds " : " does not divide ") + number_text(name);
    std::set<std::string> arithmetic;
    for (const RuleTensors* t : tensors) {
      append(f.tensors, t->names);
      arithmetic.insert(cut_text(*t, heads));
    }
    f.why.assign(arithmetic.begin(), arithmetic.end());
    f.advice = largest_tp();
    const bool is_shared = heads < config_.num_attention_heads();
    if (is_shared && tp % heads == 0 && config_.num_attention_heads() % tp == 0)
      f.advice += " " + replication_text(tensors, tp / heads);
    return f;
  }

  // Returns "1,024 rows / 16 = 64 per rank: 1/2 of a head of width 128".
  std::string cut_text(const RuleTensors& t, Index heads) const {
    const Index tp = size("tp"), section = t.section(), width = section / heads;
    std::string text = with_commas(section) + (t.rule->tp_dim == 0 ? " rows" : " columns");
    if (t.rule->sections > 1) text += " of each of " + std::to_string(t.rule->sections) + " sections";
    text += " / " + std::to_string(tp);
    if (section % tp == 0)
      return text + " = " + with_commas(section / tp) + " per rank: " + heads_text(heads, tp) + " of width " +
             with_commas(width);
    return text + " is not a whole number: " + heads_text(heads, tp) + " of width " + with_commas(width) + " per rank";
  }

  // Describes the cost of giving every rank its own copy of a head if several ranks share one.
  std::string replication_text(const std::vector<const RuleTensors*>& tensors, Index copies) const {
    std::vector<std::string> grown;
    for (const RuleTensors* t : tensors) {
      const auto elements = checked_mul(volume(t->shape), copies);
      if (!elements) return {};
      Dims shape = t->shape;
      shape[t->rule->tp_dim] *= copies;
      grown.push_back(short_name(*t) + " grows from " + with_commas(volume(t->shape)) + " to " +
                      count_of(*elements, "element") + ", " + to_string(shape));
    }
    return "With each head on " + count_of(copies, "rank") + " " + degree_text("tp", size("tp")) +
           " also works: " + join(grown, "; ") + ", in every layer.";
  }

  // Checks everything else that tensor parallelism cuts, except the vocabulary.
  void check_parts() {
    Index looked_at = 0;
    std::map<std::pair<Index, Index>, Finding> findings;  // keyed by extent and degree
    for (const RuleTensors& t : rules_) {
      if (!t.is_cut() || t.rule->is_vocabulary()) continue;
      looked_at += std::ssize(t.names);
      const Index tp = tp_of(*t.rule), n = t.section();
      const bool is_told = !t.rule->heads.empty() && config_.number(t.rule->heads) % tp != 0;
      if (n % tp == 0 || is_told) continue;
      Finding& f = findings[{n, tp}];
      f.id = "tp-uneven";
      append(f.tensors, t.names);
      f.what = degree_text("tp", tp) + " does not divide " + formula_text(t);
      f.why = {with_commas(n) + " / " + std::to_string(tp) + " leaves " + std::to_string(n % tp) +
               ": ranks would hold " + with_commas(ceil_div(n, tp)) + " and " +
               with_commas(local_extent(n, 1, tp, tp - 1)) +
               "; Megatron-LM and ColossalAI refuse that, torch cuts "
               "unevenly"};
      f.advice = largest_tp();
    }
    begin("tp", "tensor parallelism divides what it cuts", looked_at);
    for (auto& [key, finding] : findings) find(std::move(finding));
  }

  // Describes a tensor's cut dimension in the config's terms: "intermediate_size 14,336".
  std::string formula_text(const RuleTensors& t) const {
    const std::vector<std::string> formulas = split(t.rule->shape, ',');
    std::string_view formula = formulas[t.rule->tp_dim];
    while (formula.starts_with(' ')) formula.remove_prefix(1);
    return explain(formula, config_.numbers());
  }

  void check_vocabulary() {
    const Index tp = size("tp"), rows = config_.vocab_size();
    Finding f;
    f.severity = Severity::kWarning;
    f.id = "vocabulary-uneven";
    for (const RuleTensors& t : rules_)
      if (t.is_cut() && t.rule->is_vocabulary()) append(f.tensors, t.names);
    begin("vocabulary", "tensor parallelism divides the vocabulary", std::ssize(f.tensors));
    if (f.tensors.empty()) return;
    std::vector<std::string> padded;
    for (auto usual = kUsualMultiples.rbegin(); usual != kUsualMultiples.rend(); ++usual) {
      const auto& [multiple, framework] = *usual;
      if (framework.empty()) continue;
      const VocabularyPadding p{framework, multiple, padded_vocabulary(rows, multiple, tp).value_or(rows)};
      padded.push_back(std::string(p.framework) + " to " + with_commas(p.rows) + " (a multiple of " +
                       std::to_string(p.multiple) + " x " + std::to_string(tp) + ")");
      out_.paddings.push_back(p);
    }
    if (rows % tp == 0) return;
    f.what = degree_text("tp", tp) + " does not divide " + number_text("vocab_size");
    f.why = {"torch cuts it unevenly, " + count_of(ceil_div(rows, tp), "row") + " for the first ranks and " +
                 with_commas(local_extent(rows, 1, tp, tp - 1)) + " for the last, which is legal",
             "other frameworks pad it: " + join(padded, ", ")};
    f.advice = "Expect padded rows in what Megatron-LM and ColossalAI save, and remove them when converting.";
    find(std::move(f));
  }

  // ---- Pipeline

  void check_stages() {
    const Index stages = size("pp"), layers = config_.num_hidden_layers();
    CheckRun& check = begin("stages", "every pipeline stage has layers, and stages of equal work are possible", layers);
    if (stages == 1 && layers < 1) return skip(check, "the config gives no num_hidden_layers");
    if (stages > layers) {
      Finding f;
      f.id = "stages-exceeded";
      f.what = degree_text("pp", stages) + " exceeds " + number_text("num_hidden_layers");
      f.why = {count_of(stages, "stage") + ", " + count_of(layers, "layer") + ": " + with_commas(stages - layers) +
               " would have none"};
      f.advice = "The largest pp is " + std::to_string(layers) + ".";
      return find(std::move(f));
    }
    if (layers % stages == 0 || (layers + 2) % stages == 0) return;
    Finding f;
    f.severity = Severity::kNote;
    f.id = "stages-uneven";
    f.what = degree_text("pp", stages) + " divides neither " + number_text("num_hidden_layers") +
             " nor layers + 2, so stages have unequal work";
    f.why = {"layers per stage in torchtitan's distribution, where the embedding and the head count as one each: " +
             dealt_text(layers, stages)};
    f.advice =
        "The pipeline runs at the pace of its fullest stage. Megatron-LM refuses this unless the first and the "
        "last stage have their own number of layers.";
    find(std::move(f));
  }

  // Returns runs of stages with the same number of layers: "stages 0..1: 9, stage 2: 8".
  static std::string dealt_text(Index layers, Index stages) {
    std::vector<Index> counts(stages);
    for (Index i = 0; i < layers; ++i) ++counts[stage_of_layer(StageRule::kTorchtitan, i, layers, stages)];
    std::vector<std::string> runs;
    for (std::size_t i = 0; i < counts.size();) {
      std::size_t j = i;
      while (j + 1 < counts.size() && counts[j + 1] == counts[i]) ++j;
      runs.push_back(
          (i == j ? "stage " + std::to_string(i) : "stages " + std::to_string(i) + ".." + std::to_string(j)) + ": " +
          std::to_string(counts[i]));
      i = j + 1;
    }
    return join(runs, ", ");
  }

  // ---- Experts

  void check_experts() {
    const Index ep = size(kEp), experts = config_.number("num_experts");
    Finding f;
    for (const RuleTensors& t : rules_)
      if (t.rule->is_per_expert()) append(f.tensors, t.names);
    const bool has_experts = !f.tensors.empty();
    CheckRun& check = begin("experts", "expert parallelism divides the experts and their ranks", std::ssize(f.tensors));
    if (ep == 1) return skip(check, has_experts ? "no ep is given" : "the model has no experts");
    if (!has_experts) {
      f.id = "experts-none";
      f.what = degree_text(kEp, ep) + ", but the model has no experts";
      f.advice = "Drop ep.";
      return find(std::move(f));
    }
    if (experts % ep != 0) {
      Finding uneven = f;
      uneven.id = "experts-uneven";
      uneven.what =
          degree_text(kEp, ep) + (ep > experts ? " exceeds " : " does not divide ") + number_text("num_experts");
      uneven.why = {with_commas(experts) + " / " + std::to_string(ep) + " is not a whole number of experts per rank"};
      uneven.advice = "The nearest degrees that divide them: " + nearest_divisors(experts, ep) + ".";
      find(std::move(uneven));
    }
    if (expert_sharding(degrees())) return;
    const Index shards = degrees().shards();
    f.id = "experts-degree";
    f.what = degree_text(kEp, ep) + " divides neither dp_shard x cp = " + with_commas(shards) +
             " nor dp_shard x cp x tp" + " = " + with_commas(shards * size("tp"));
    f.why = {
        "ep does not add ranks: it divides those over which FSDP shards, so it must divide "
        "their number"};
    f.advice = "The nearest degrees that do: " + nearest_divisors(shards, ep) + ".";
    find(std::move(f));
  }

  // Returns "8 and 16": the divisors of n around `wanted`.
  static std::string nearest_divisors(Index n, Index wanted) {
    Index below = std::min(n, wanted), above = wanted;
    while (n % below != 0) --below;
    while (above < n && n % above != 0) ++above;
    return std::to_string(below) +
           (above <= n && above != below && n % above == 0 ? " and " + std::to_string(above) : "");
  }

  // ---- FSDP

  void check_shards() {
    Finding f;
    f.severity = Severity::kNote;
    f.id = "shards-empty";
    Index looked_at = 0;
    std::set<std::string> reasons;
    for (const RuleTensors& t : rules_) {
      looked_at += std::ssize(t.names);
      const Index rows = rows_to_shard(t), pieces = shards_of(*t.rule);
      if (rows >= pieces) continue;
      reasons.insert(count_of(rows, "row") + " for " + count_of(pieces, "shard") + ": " +
                     count_of(pieces - rows, "rank") + (pieces - rows == 1 ? " holds" : " hold") + " nothing of it");
      append(f.tensors, t.names);
    }
    begin("shards", "FSDP leaves no rank without a part of any tensor", looked_at);
    if (f.tensors.empty()) return;
    f.what = "FSDP leaves ranks without a part";
    f.why.assign(reasons.begin(), reasons.end());
    f.advice = "Harmless except for the balance of memory. Such ranks save empty boxes, or none.";
    find(std::move(f));
  }

  // Returns the rows of the first rank after tensor parallelism.
  Index rows_to_shard(const RuleTensors& t) const {
    if (t.shape.rank() == 0) return 1;
    if (!t.is_cut() || t.rule->tp_dim != 0) return t.shape[0];
    return local_extent(t.shape[0], t.rule->sections, tp_of(*t.rule), 0);
  }
  Index shards_of(const NameRule& rule) const {
    const auto experts = expert_sharding(degrees());
    return rule.is_per_expert() && experts ? experts->shards : degrees().shards();
  }

  // ---- Sequences

  // Ring attention with a balanced load gives each rank of cp two pieces, the k-th and the k-th from the end. Tensor
  // parallelism divides a rank's tokens between the blocks (sequence parallelism).
  void check_sequence() {
    const Index cp = size("cp"), tp = size("tp");
    CheckRun& check = begin("sequence", "context and sequence parallelism divide the sequence", 1);
    if (!request_.sequence) return skip(check, "no --sequence");
    const Index n = *request_.sequence, pieces = cp > 1 ? 2 * cp : 1;
    const auto find_uneven = [&](Severity severity, const char* id, Index unit, const std::string& product,
                                 std::string why) {
      Finding f;
      f.severity = severity;
      f.id = id;
      f.what = "a sequence of " + with_commas(n) + " tokens is not divisible by " + product + " = " + with_commas(unit);
      f.why = {std::move(why)};
      const Index fewer = n / unit * unit;
      f.advice = "The nearest lengths that are: " + (fewer > 0 ? with_commas(fewer) + " and " : std::string()) +
                 with_commas(fewer + unit) + ".";
      find(std::move(f));
    };
    if (n % pieces != 0)
      find_uneven(Severity::kError, "sequence-uneven", pieces, "2 x cp",
                  "ring attention with a balanced load gives each of the " + count_of(cp, "rank") +
                      " one piece from the front and one from the back");
    else if (n % (pieces * tp) != 0)
      find_uneven(Severity::kWarning, "sequence-tp", pieces * tp, cp > 1 ? "2 x cp x tp" : "tp",
                  "sequence parallelism divides a rank's tokens over tp");
  }

  const Family& family_;
  const ModelConfig& config_;
  const FeasibilityRequest& request_;
  std::vector<RuleTensors> rules_;
  Feasibility out_;
};

}  // namespace

Result<Degrees> parse_degrees(std::string_view text) {
  std::vector<std::string> axes;
  std::string experts;
  for (const std::string& part : split(text, ',')) {
    const std::size_t equals = std::min(part.find('='), part.size());
    const std::string name = part.substr(0, equals);
    if (name == kEp && !experts.empty()) return usage_error("mesh axis 'ep' is given twice");
    if (name == kEp)
      experts = part;
    else
      axes.push_back(name == kDp ? std::string(kDpShard) + part.substr(equals) : part);
  }
  Degrees degrees;
  // "ep=2" alone leaves no axes; other malformed axes are left for Mesh::parse() to report.
  if (!axes.empty()) degrees.mesh = TRY(Mesh::parse(join(axes, ",")));
  if (!experts.empty()) degrees.ep = TRY(Mesh::parse(experts)).size(kEp);
  return degrees;
}

std::string to_string(const Degrees& degrees) {
  std::vector<MeshAxis> axes = degrees.mesh.axes();
  if (degrees.ep > 1) axes.push_back({std::string(kEp), degrees.ep});
  return Mesh(std::move(axes)).to_string();
}

Result<Feasibility> check_feasibility(const Family& family, const ModelConfig& config,
                                      const FeasibilityRequest& request) {
  if (is_class_family(family))
    for (const std::string_view axis : {std::string_view("pp"), std::string_view("tp"), kEp})
      if (const Index n = axis == kEp ? request.degrees.ep : request.degrees.size(axis); n > 1)
        return unsupported(config.path + ": no family describes how " + degree_text(axis, n) + " cuts a " +
                           family.name + "; use dp_shard, dp_replicate or cp");
  return Audit(family, config, request).run();
}

}  // namespace reshard
