// SPDX-License-Identifier: Apache-2.0
#include "lib/model/parameters.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "lib/base/text.h"
#include "lib/model/formula.h"
#include "lib/model/kept_dtypes.h"

namespace reshard {
namespace {

bool holds(std::string_view condition, const ModelConfig& config) {
  if (condition.empty()) return true;
  const bool negated = condition.front() == '!';
  const auto n = evaluate(condition.substr(negated ? 1 : 0),
                          [&](std::string_view name) { return std::optional<Index>(config.number(name)); });
  return n && (*n != 0) != negated;
}

bool has_layer(const NameRule& rule, const ModelConfig& config, Index layer) {
  if (rule.place != NameRule::Place::kLayer) return true;
  if (!rule.layer_type.empty() && config.layer_type(layer) != rule.layer_type) return false;
  switch (rule.layers) {
    case Layers::kAll:
      return true;
    case Layers::kPrediction:
      return layer >= config.num_hidden_layers();
    case Layers::kLinear:
    case Layers::kAttention:
      return config.is_linear_layer(layer) == (rule.layers == Layers::kLinear);
    case Layers::kDense:
    case Layers::kSparse:
      break;
  }
  return config.is_sparse_layer(layer) == (rule.layers == Layers::kSparse);
}

// Collects the parameters of a range of layers, or of the model outside its layers.
class ParameterList {
 public:
  ParameterList(const Family& family, const ModelConfig& config) : family_(family), config_(config) {}

  Status add_layers(Index begin, Index end) {
    TRY(check_count(begin, end));
    for (const NameRule& rule : family_.rules)
      if (rule.place == NameRule::Place::kLayer) TRY(add(rule, begin, end));
    return {};
  }
  Status add_all() {
    TRY(check_count(0, config_.num_hidden_layers()));
    for (const NameRule& rule : family_.rules)
      if (!is_optional(rule))
        TRY(rule.place == NameRule::Place::kLayer ? add(rule, 0, config_.num_hidden_layers()) : add(rule, -1, 0));
    return {};
  }
  Status add_optional() {
    for (const NameRule& rule : family_.rules)
      if (is_optional(rule)) TRY(add(rule, -1, 0));
    return {};
  }
  std::vector<Parameter> take() { return std::move(out_); }
  std::vector<Parameter> take_chosen_scales() { return std::move(scales_); }

 private:
  // Returns whether it belongs to a replaced head. A tied head is the embedding and need not be stored.
  bool is_optional(const NameRule& rule) const {
    return rule.shape.starts_with("vocab_size") && rule.place == NameRule::Place::kLast && has_other_head(config_) &&
           !config_.tie_word_embeddings();
  }
  Index experts_of(const NameRule& rule) const { return rule.is_per_expert() ? config_.number("num_experts") : 1; }

  // Checks the number before creating any: 425 bytes of config.json could otherwise require gigabytes.
  Status check_count(Index begin, Index end) const {
    Index room = kMaxParameters;
    for (const NameRule& rule : family_.rules) {
      if (rule.place != NameRule::Place::kLayer || rule.is_dropped() || !holds(rule.when, config_)) continue;
      const Index each = std::max<Index>(0, experts_of(rule));
      const auto count = checked_mul(end - begin, each);
      if (!count || *count > room)
        return corrupt(config_.path + ": describes more than " + with_commas(kMaxParameters) + " tensors: " +
                       count_of(end - begin, "layer") + " of " + with_commas(each) + " '" + printable(rule.hf) + "'");
      room -= *count;
    }
    return {};
  }

  Status add(const NameRule& rule, Index begin, Index end) {
    if (rule.is_dropped() || !holds(rule.when, config_)) return {};
    const Index experts = experts_of(rule);
    if (experts < 1) return {};
    std::optional<Parameter> alike;
    for (Index layer = begin; layer < end; ++layer) {
      if (!has_layer(rule, config_, layer)) continue;
      if (!alike || !rule.shape_of_type.empty()) alike = of_rule(rule, TRY(expected_shape(rule, config_, layer)));
      const auto here = checked_mul(volume(alike->shape), experts);
      if (!here || *here > kMaxElements - elements_)
        return corrupt(config_.path + ": describes more than " + with_commas(kMaxElements) + " elements");
      elements_ += *here;
      for (Index expert = 0; expert < experts; ++expert) add(*alike, layer, rule.is_per_expert() ? expert : -1);
    }
    return {};
  }

  Parameter of_rule(const NameRule& rule, const Dims& shape) const {
    Parameter p;
    p.shape = shape;
    p.rule = &rule;
    p.is_tied = !rule.tied_to.empty() && config_.tie_word_embeddings();
    const DType as = dtype_from_torch(config_.dtype).value_or(DType::kBFloat16);
    const auto kept = kept_dtype(family_, &config_, rule, as);
    p.has_own_dtype = kept && kept != as;
    p.dtype = kept ? info(*kept).torch_name : config_.dtype;
    return p;
  }

  void add(Parameter p, Index layer, Index expert) {
    const NameRule& rule = *p.rule;
    p.name = format_pattern(rule.hf, layer, expert);
    p.layer = layer;
    p.expert = expert;
    if (rule.quantized == Quantized::kMxfp4 && config_.has_mxfp4() && !config_.is_left_unquantized(p.name)) {
      add_mxfp4(std::move(p));
      return;
    }
    const auto& float8 = config_.float8;
    if (!float8 || !(float8->is_chosen ? rule.is_matrix() : rule.quantized == Quantized::kFloat8) ||
        config_.is_left_unquantized(p.name)) {
      out_.push_back(std::move(p));
      return;
    }
    Parameter scale = p;
    scale.name += float8->suffix;
    scale.shape = float8->shape(p.shape);
    scale.is_scale = true;
    scale.dtype = float8->is_chosen ? "" : "float32";
    if (!float8->is_chosen) p.dtype = "float8_e4m3fn";
    out_.push_back(std::move(p));
    (float8->is_chosen ? scales_ : out_).push_back(std::move(scale));
  }

  // `p` is [E, in, out].
  void add_mxfp4(Parameter p) {
    Parameter scales = p;
    scales.name += kMxfp4Scales;
    scales.shape = {p.shape[0], p.shape[2], ceil_div(p.shape[1], kMxfp4Group)};
    scales.is_scale = true;
    scales.dtype = p.dtype = "uint8";
    p.name += kMxfp4Blocks;
    p.values = p.shape;
    p.shape = {scales.shape[0], scales.shape[1], scales.shape[2], kMxfp4Bytes};
    out_.push_back(std::move(p));
    out_.push_back(std::move(scales));
  }

  static constexpr Index kMaxParameters = 500'000;       // DeepSeek-V3 has 46,000, without scales
  static constexpr Index kMaxElements = Index{1} << 55;  // so that sizes in bytes do not overflow
  const Family& family_;
  const ModelConfig& config_;
  Index elements_ = 0;
  std::vector<Parameter> out_;
  std::vector<Parameter> scales_;  // scales of matrices that may be float8
};

Status check_quantization(const Family& family, const ModelConfig& config) {
  if (knows_quantization(family, config)) return {};
  return unsupported(config.path + ": unknown quantization '" + printable(config.quantization) +
                     "' of a model of family " + family.name);
}

}  // namespace

Result<Dims> expected_shape(const NameRule& rule, const ModelConfig& config, Index layer) {
  Dims shape;
  for (const std::string& formula : split(rule.shape_in(config.layer_type(layer)), ',')) {
    const Index n = TRY(evaluate(formula, config.numbers()).context(config.path).context(rule.hf));
    if (n < 1) return corrupt(config.path + ": " + explain(formula, config.numbers()) + ": expected a positive size");
    shape.push_back(n);
  }
  if (!checked_volume(shape)) return corrupt(config.path + ": " + std::string(rule.hf) + ": the shape overflows");
  return shape;
}

std::vector<const NameRule*> required_rules(const Family& family, const ModelConfig* config) {
  const auto is_required = [&](const NameRule& rule) {
    if (rule.is_dropped() || rule.layers == Layers::kPrediction) return false;
    if (!config) return rule.when.empty() && rule.tied_to.empty() && rule.layers == Layers::kAll;
    if (!rule.tied_to.empty() && (config->tie_word_embeddings() || has_other_head(*config))) return false;
    if (!holds(rule.when, *config)) return false;
    for (Index layer = 0; layer < config->num_hidden_layers(); ++layer)
      if (has_layer(rule, *config, layer)) return true;
    return rule.place != NameRule::Place::kLayer;
  };
  std::vector<const NameRule*> out;
  for (const NameRule& rule : family.rules)
    if (is_required(rule)) out.push_back(&rule);
  return out;
}

Result<std::vector<Parameter>> parameters(const Family& family, const ModelConfig& config) {
  TRY(check_quantization(family, config));
  ParameterList list(family, config);
  TRY(list.add_all());
  return list.take();
}

Result<std::vector<Parameter>> optional_parameters(const Family& family, const ModelConfig& config) {
  TRY(check_quantization(family, config));
  ParameterList model(family, config), prediction(family, config);
  const Index begin = config.num_hidden_layers();
  const auto end = checked_add(begin, std::max<Index>(0, config.num_prediction_layers()));
  if (!end) return corrupt(config.path + ": num_nextn_predict_layers overflows");
  TRY(prediction.add_layers(begin, *end));
  TRY(prediction.add_optional());
  std::vector<Parameter> out = prediction.take();
  if (!config.float8 || !config.float8->is_chosen) return out;
  TRY(model.add_all());
  for (ParameterList* list : {&model, &prediction})
    for (Parameter& scale : list->take_chosen_scales()) out.push_back(std::move(scale));
  return out;
}

bool is_headless(const ModelConfig& config) {
  const std::string_view name = config.architecture;
  return name.ends_with("Model") && name.find("Head") == std::string_view::npos;
}

bool has_other_head(const ModelConfig& config) {
  const std::string_view name = config.architecture;
  return name.ends_with("Classification") || name.ends_with("QuestionAnswering") || is_headless(config);
}

bool is_other_head(std::string_view parameter) {
  static constexpr std::string_view kHeads[] = {"value_head.", "score.", "classifier.", "qa_outputs."};
  return std::any_of(std::begin(kHeads), std::end(kHeads),
                     [&](std::string_view head) { return parameter.starts_with(head); });
}

Index count_elements(const std::vector<Parameter>& parameters) {
  Index sum = 0;
  for (const Parameter& p : parameters)
    if (!p.is_tied && !p.is_scale) sum += volume(p.value_shape());
  return sum;
}

}  // namespace reshard
