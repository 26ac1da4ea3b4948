#include "lib/convert/adapter.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/device/convert.h"
#include "lib/device/low_rank.h"
#include "lib/model/config.h"
#include "lib/model/family.h"
#include "lib/model/parts.h"

namespace reshard {
namespace {

constexpr std::string_view kConfig = "adapter_config.json";
constexpr std::string_view kTrainedModule = ".modules_to_save.", kBaseLayer = ".base_layer.";

// A key of an adapter's tensor taken apart.
struct Operand {
  enum class Kind { kA, kB, kWhole, kUnknown } kind = Kind::kUnknown;
  std::string of;  // of a pair the module, "model.layers.0.self_attn.q_proj"; else the weight, "lm_head.weight"
};
Operand operand_of(std::string_view key) {
  if (const std::size_t at = key.find(kPeftPrefix); at != std::string_view::npos)
    key.remove_prefix(at + kPeftPrefix.size());
  for (const auto kind : {Operand::Kind::kA, Operand::Kind::kB}) {
    const std::size_t at = key.find(kind == Operand::Kind::kA ? ".lora_A." : ".lora_B.");
    if (at == std::string_view::npos || !key.ends_with(".weight")) continue;
    if (key.substr(0, at).find(".base_layer") != std::string_view::npos)
      return {};  // of a parameter that is no layer's
    return {kind, std::string(key.substr(0, at))};
  }
  if (is_adapter(key)) return {};
  std::string weight(key);
  if (const std::size_t at = weight.find(kTrainedModule); at != std::string::npos)
    weight.erase(at, weight.find('.', at + kTrainedModule.size()) - at);  // with the adapter's name
  if (const std::size_t at = weight.find(kBaseLayer); at != std::string::npos) weight.erase(at, kBaseLayer.size() - 1);
  return {Operand::Kind::kWhole, weight};
}

struct Pair {
  std::optional<std::size_t> a, b;
};

class AdapterReader {
 public:
  AdapterReader(Reader& reader, const AdapterOptions& options, const Selection& selection, bool merges)
      : reader_(reader), options_(options), selection_(selection), merges_(merges) {
    const auto& tensors = reader_.catalog().tensors();
    is_beside_weights_ = std::any_of(tensors.begin(), tensors.end(),
                                     [](const Tensor& t) { return t.key().starts_with(kAdapterPrefix); });
  }

  Result<Adapter> read(const SourceView& view, const Translation& names) {
    TRY(find_operands());
    TRY(read_config());
    Adapter out;
    out.config = text_;
    if (!merges_) return out;
    out.added = TRY(match_pairs(view, names.model));
    out.replaced = TRY(match_whole(view, names.model));
    // A layer whose pair lies beside its weight: an embedding, in PEFT's own files.
    for (LowRank& m : out.added)
      std::erase_if(out.replaced, [&](const Replaced& r) {
        if (r.weight == m.weight) m.onto = r.by;
        return r.weight == m.weight;
      });
    return out;
  }

  bool is_there() const {
    const auto& tensors = reader_.catalog().tensors();
    return std::any_of(tensors.begin(), tensors.end(),
                       [&](const Tensor& t) { return is_own(t) && operand_of(t.key()).kind != Operand::Kind::kWhole; });
  }

 private:
  // What an adapter has that was given by itself is all its own.
  bool is_own(const Tensor& t) const {
    const bool is_selected =
        options_.reader ? !any_glob_matches(selection_.exclude, t.name) : selects(selection_, t.name);
    if (!is_selected || state_kind(t.key()) == StateKind::kOptimizer) return false;
    return is_beside_weights_ ? t.key().starts_with(kAdapterPrefix) : options_.reader || is_adapter(t.key());
  }
  const std::string& root() const { return reader_.catalog().root; }

  Error unknown(const Tensor& t, const std::string& why) const {
    return unsupported(root() + ": " + tensor_text(t.name) + ": " + why +
                       "of adapters matrices lora_A and lora_B of linear layers are known, and weights that they have "
                       "whole; --exclude leaves it out");
  }

  Status find_operands() {
    const auto& tensors = reader_.catalog().tensors();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& t = tensors[i];
      if (!is_own(t)) continue;
      const Operand operand = operand_of(t.key());
      const bool is_whole = operand.kind == Operand::Kind::kWhole;
      if (operand.kind == Operand::Kind::kUnknown || (!is_whole && t.shape.rank() != 2) ||
          !can_convert(t.dtype, DType::kFloat32))
        return unknown(t, "");
      std::optional<std::size_t>& slot = is_whole                            ? whole_[operand.of]
                                         : operand.kind == Operand::Kind::kA ? pairs_[operand.of].a
                                                                             : pairs_[operand.of].b;
      if (slot)
        return unsupported(root() + ": " + tensor_text(tensors[*slot].name) + " and " + tensor_text(t.name) +
                           ": several adapters of one layer; --exclude leaves one of them out");
      slot = i;
    }
    for (const auto& [module, pair] : pairs_) {
      if (!pair.a || !pair.b)
        return corrupt(root() + ": " + tensor_text(tensors[pair.a ? *pair.a : *pair.b].name) + ": its lora_" +
                       (pair.a ? "B" : "A") + " is not there");
      const Tensor &a = tensors[*pair.a], &b = tensors[*pair.b];
      if (a.shape[0] != b.shape[1] || a.shape[0] < 1)
        return corrupt(root() + ": " + tensor_text(a.name) + " " + to_string(a.shape) + " and " + tensor_text(b.name) +
                       " " + to_string(b.shape) + ": expected as many rows of the one as columns of the other");
      ranks_[a.shape[0]].push_back(module);
    }
    return {};
  }

  Status read_config() {
    std::string path = find_beside(reader_.catalog(), kConfig);
    if (path.empty()) {
      if (!options_.alpha)
        return usage_error(root() + ": its adapter has rank " + std::to_string(ranks_.begin()->first) +
                           ", and no adapter_config.json beside it says the alpha; give it with --lora-alpha");
      text_ = made_config();
      alpha_ = *options_.alpha;
      return {};
    }
    const std::string text = TRY(read_whole_file(path, kMaxConfigBytes));
    return use_config(TRY(parse_json(text, path)), text).context(path);
  }

  // Whether the matrices were made of the weights, which lost at once what they had gained (PiSSA, OLoRA, LoftQ, ...):
  // such an adapter belongs to those weights alone, and PEFT makes them anew where it loads one.
  static bool is_taken_from_weights(const Json& json) {
    const Json* const how = json.find("init_lora_weights");
    if (!how || !how->is_string()) return false;
    const auto word = *how->as_string();
    return word != "gaussian" && word != "eva" && word != "orthogonal";
  }

  Status use_config(const Json& json, const std::string& text) {
    text_ = text;
    if (is_taken_from_weights(json)) {
      if (options_.reader && merges_)
        return unsupported(
            "init_lora_weights: the adapter was made of the weights, and changed them when its training "
            "began; convert the training state, or save it by PEFT with "
            "path_initial_model_for_weight_conversion");
      Json plain = json;
      text_ = to_text(plain.set("init_lora_weights", true), 2) + "\n";
    }
    const Index r = TRY(json.get_index("r"));
    std::set<Index> allowed = {r};
    if (const Json* pattern = json.find("rank_pattern"); pattern && pattern->is_object())
      for (const Json::Member& m : TRY(pattern->as_object())) allowed.insert(TRY(m.value.as_index()));
    for (const auto& [rank, modules] : ranks_)
      if (!allowed.contains(rank))
        return corrupt("r " + std::to_string(r) + ": the matrices of '" + printable(modules.front()) + "' have rank " +
                       std::to_string(rank));
    const Json* const alpha = json.find("lora_alpha");
    if (!alpha || !alpha->is_number()) return corrupt("lora_alpha: expected a number");
    alpha_ = TRY(alpha->as_double());
    if (options_.alpha && *options_.alpha != alpha_)
      return usage_error("lora_alpha is another than --lora-alpha; leave the option out");
    if (!merges_) return {};
    const Json* const bias = json.find("bias");
    const bool trains_bias = bias && bias->is_string() && *bias->as_string() != "none";
    if (trains_bias && options_.reader && is_beside_weights_)
      return unsupported(
          "bias: it was trained with the adapter, and lies in the weights beside it; convert these, "
          "without --adapter");
    for (const std::string_view member : {"use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora"})
      if (const Json* flag = json.find(member); flag && flag->is_bool() && TRY(flag->as_bool()))
        return unsupported(std::string(member) + ": an adapter of this kind cannot be merged");
    if (const Json* pattern = json.find("alpha_pattern"); pattern && pattern->is_object() && pattern->size() > 0)
      return unsupported("alpha_pattern: an adapter with several alphas cannot be merged");
    if (const Json* flag = json.find("use_rslora"); flag && flag->is_bool()) rooted_ = TRY(flag->as_bool());
    return {};
  }

  // What PEFT needs to load it.
  std::string made_config() const {
    std::set<std::string> targets;
    const Index most = std::max_element(ranks_.begin(), ranks_.end(), [](const auto& x, const auto& y) {
                         return x.second.size() < y.second.size();
                       })->first;
    Json pattern = Json::object(), list = Json::array();
    for (const auto& [rank, modules] : ranks_)
      for (const std::string& module : modules) {
        targets.insert(module.substr(module.rfind('.') + 1));
        if (rank != most) pattern.set(module, rank);
      }
    for (const std::string& target : targets) list.push_back(target);
    Json out = Json::object();
    out.set("peft_type", "LORA").set("task_type", "CAUSAL_LM").set("base_model_name_or_path", Json());
    out.set("r", most).set("lora_alpha", Json(*options_.alpha)).set("rank_pattern", std::move(pattern));
    out.set("target_modules", std::move(list)).set("bias", "none").set("inference_mode", true);
    std::set<std::string> modules;
    for (const auto& [weight, tensor] : whole_) modules.insert(weight.substr(0, weight.rfind('.')));
    if (!modules.empty()) {
      Json whole = Json::array();
      for (const std::string& module : modules) whole.push_back(module);
      out.set("modules_to_save", std::move(whole));
    }
    return to_text(out, 2) + "\n";
  }

  Result<std::vector<LowRank>> match_pairs(const SourceView& view, const Model& model) const {
    const auto& tensors = reader_.catalog().tensors();
    const auto& weights = view.catalog.tensors();
    std::vector<LowRank> out;
    for (const auto& [module, pair] : pairs_) {
      const std::string key = module + ".weight";
      const auto weight = find_weight(key, view.catalog, model.family);
      const Tensor &a = tensors[*pair.a], &b = tensors[*pair.b];
      if (!weight)
        return corrupt(root() + ": an adapter of another model: " + tensor_text(a.name) + " changes '" +
                       printable(key) + "', which is not there");
      TRY(check_untied(a, key, model));
      const Tensor& w = weights[*weight];
      if (w.shape != Dims{b.shape[0], a.shape[1]})
        return corrupt(root() + ": an adapter of another model: " + tensor_text(b.name) + " " + to_string(b.shape) +
                       " x " + tensor_text(a.name) + " " + to_string(a.shape) + " changes " + tensor_text(w.name) +
                       " " + to_string(w.shape));
      TRY(check_changeable(w));
      const Index rank = a.shape[0];
      const double divisor = rooted_ ? std::sqrt(static_cast<double>(rank)) : static_cast<double>(rank);
      out.push_back({*weight, *pair.a, *pair.b, std::nullopt, rank, static_cast<float>(alpha_ / divisor)});
    }
    return out;
  }

  Result<std::vector<Replaced>> match_whole(const SourceView& view, const Model& model) const {
    std::vector<Replaced> out;
    for (const auto& [key, tensor] : whole_) {
      const Tensor& t = reader_.catalog().tensors()[*tensor];
      TRY(check_untied(t, key, model));
      const auto weight = find_weight(key, view.catalog, model.family);
      if (!weight) return unknown(t, "no weight of the model is called '" + printable(key) + "'; ");
      const Tensor& w = view.catalog.tensors()[*weight];
      if (w.shape != t.shape)
        return unsupported(
            root() + ": " + tensor_text(t.name) + " " + to_string(t.shape) + " is to be instead of " +
            tensor_text(w.name) + " " + to_string(w.shape) +
            ": of another model, or of one whose vocabulary was resized, which --merge-adapter does not");
      TRY(check_changeable(w));
      out.push_back({*weight, *tensor});
    }
    return out;
  }

  // `t` changes the weight of this key.
  Status check_untied(const Tensor& t, const std::string& key, const Model& model) const {
    const auto name = model.family ? parse_name(*model.family, key) : std::nullopt;
    if (!name || !name->rule->is_vocabulary() || !model.config || !model.config->tie_word_embeddings()) return {};
    return unsupported(root() + ": " + tensor_text(t.name) +
                       ": the embedding and the head of the model are one tensor, and the adapter has trained one of "
                       "them apart: merged they would be two, which config.json denies; --exclude leaves it out");
  }

  Status check_changeable(const Tensor& w) const {
    if (can_convert(w.dtype, DType::kFloat32) && byte_size(w.dtype) >= 2) return {};
    return unsupported(root() + ": " + tensor_text(w.name) + " is " + std::string(info(w.dtype).torch_name) +
                       ": an adapter can be added to floating-point weights only");
  }

  // An adapter of a model without its head has names without "model."; the weights' keys have it.
  static std::optional<std::size_t> find_weight(const std::string& key, const Catalog& weights, const Family* family) {
    if (!family) return weights.find(key);
    const auto weight = weights.find(canonical_key(*family, key));
    return weight ? weight : weights.find(canonical_key(*family, base_prefix(*family) + key));
  }

  Reader& reader_;
  const AdapterOptions& options_;
  const Selection& selection_;
  const bool merges_;
  bool is_beside_weights_ = false;
  std::map<std::string, Pair> pairs_;                        // by the module
  std::map<std::string, std::optional<std::size_t>> whole_;  // by the weight
  std::map<Index, std::vector<std::string>> ranks_;
  std::string text_;
  double alpha_ = 0;
  bool rooted_ = false;
};

}  // namespace

bool holds_adapter(const Format& format) {
  return format.hf_names && format.holds == Holds::kModel && format.sharding == Sharding::kNone;
}

Result<std::optional<Adapter>> read_adapter(Reader& source, const AdapterOptions& options, AdapterUse use,
                                            const Selection& selection, const SourceView& view,
                                            const Translation& names) {
  Reader& reader = options.reader ? *options.reader : source;
  const bool merges = use == AdapterUse::kMerged;
  AdapterReader adapter(reader, options, selection, merges);
  if (use == AdapterUse::kNone) return std::optional<Adapter>();
  const std::string& root = reader.catalog().root;
  if (!adapter.is_there()) {
    if (merges) return usage_error(root + ": --merge-adapter: no adapter is there; --adapter says where one is");
    return std::optional<Adapter>();
  }
  const Convention convention = names.model.convention;
  if (!options.reader && names.model.family && convention != Convention::kHf && convention != Convention::kTransformers)
    return unsupported(root + ": an adapter to a model under " + std::string(convention_title(convention)) +
                       ", which PEFT does not know; --exclude '*lora_*' leaves it out");
  return std::optional(TRY(adapter.read(view, names)));
}

std::vector<std::size_t> Adapter::operands() const {
  std::vector<std::size_t> out;
  for (const LowRank& m : added) {
    out.insert(out.end(), {m.a, m.b});
    if (m.onto) out.push_back(*m.onto);
  }
  for (const Replaced& r : replaced) out.push_back(r.by);
  std::sort(out.begin(), out.end());
  return out;
}

namespace {

Status read_as(DType dtype, TensorSource& source, std::size_t tensor, const Box& box, MutableBytes out,
               MutableBytes scratch) {
  const DType stored = source.catalog().tensors()[tensor].dtype;
  if (stored == dtype) return source.read(tensor, box, out, scratch);
  std::vector<std::byte> elements(static_cast<std::size_t>(volume(box) * byte_size(stored)));
  TRY(source.read(tensor, box, elements, scratch));
  convert(stored, dtype, elements.data(), out.data(), volume(box));
  return {};
}

}  // namespace

void merge_adapter(const Adapter& adapter, TensorSource& stored, TensorSource& operands, ComputedSource& source) {
  for (const LowRank& m : adapter.added) {
    source.set(m.weight, [&stored, &operands, m](const Box& box, MutableBytes out, MutableBytes scratch) -> Status {
      const DType dtype = stored.catalog().tensors()[m.weight].dtype;
      TRY(m.onto ? read_as(dtype, operands, *m.onto, box, out, scratch) : stored.read(m.weight, box, out, scratch));
      if (box.empty()) return {};
      const DType delta = operands.catalog().tensors()[m.b].dtype;
      const auto a = TRY(read_floats(operands, m.a, {{0, box.origin[1]}, {m.rank, box.shape[1]}}, scratch));
      const auto b = TRY(read_floats(operands, m.b, {{box.origin[0], 0}, {box.shape[0], m.rank}}, scratch));
      add_low_rank(out.data(), dtype, b.data(), a.data(), box.shape[0], box.shape[1], m.rank, m.scaling, delta);
      return {};
    });
  }
  for (const Replaced& r : adapter.replaced) {
    const DType dtype = stored.catalog().tensors()[r.weight].dtype;
    source.set(r.weight, [&operands, r, dtype](const Box& box, MutableBytes out, MutableBytes scratch) {
      return read_as(dtype, operands, r.by, box, out, scratch);
    });
  }
}

}  // namespace reshard
