#include "lib/convert/adapter.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/convert/module_pattern.h"
#include "lib/device/convert.h"
#include "lib/device/low_rank.h"
#include "lib/model/config.h"
#include "lib/model/family.h"
#include "lib/model/parts.h"

namespace reshard {
namespace {

constexpr std::string_view kTrainedModule = ".modules_to_save.", kBaseLayer = ".base_layer.";
constexpr std::string_view kTrainedRows = ".token_adapter.trainable_tokens_delta";

// A key of an adapter's tensor taken apart.
struct Operand {
  enum class Kind { kA, kB, kWhole, kRows, kUnknown } kind = Kind::kUnknown;
  // Of a pair, and of rows, the module, "model.layers.0.self_attn.q_proj"; else the weight, "lm_head.weight".
  std::string of;
  bool is_embeddings = false;

  bool is_of_pair() const { return kind == Kind::kA || kind == Kind::kB; }
};
struct PairWord {
  Operand::Kind kind;
  std::string_view word, end;  // after the module, and of the key
  bool is_embeddings;
};
constexpr PairWord kPairWords[] = {{Operand::Kind::kA, ".lora_A.", ".weight", false},
                                   {Operand::Kind::kB, ".lora_B.", ".weight", false},
                                   {Operand::Kind::kA, ".lora_embedding_A", ".lora_embedding_A", true},
                                   {Operand::Kind::kB, ".lora_embedding_B", ".lora_embedding_B", true}};
Operand operand_of(std::string_view key) {
  if (const std::size_t at = key.find(kPeftPrefix); at != std::string_view::npos)
    key.remove_prefix(at + kPeftPrefix.size());
  for (const PairWord& word : kPairWords) {
    const std::size_t at = key.find(word.word);
    if (at == std::string_view::npos || !key.ends_with(word.end)) continue;
    if (key.substr(0, at).find(".base_layer") != std::string_view::npos)
      return {};  // of a parameter that is no layer's
    return {word.kind, std::string(key.substr(0, at)), word.is_embeddings};
  }
  if (key.ends_with(kTrainedRows))
    return {Operand::Kind::kRows, std::string(key.substr(0, key.size() - kTrainedRows.size()))};
  if (is_adapter(key)) return {};
  std::string weight(key);
  if (const std::size_t at = weight.find(kTrainedModule); at != std::string::npos)
    weight.erase(at, weight.find('.', at + kTrainedModule.size()) - at);  // with the adapter's name
  if (const std::size_t at = weight.find(kBaseLayer); at != std::string::npos) weight.erase(at, kBaseLayer.size() - 1);
  return {Operand::Kind::kWhole, weight};
}

struct Pair {
  std::optional<std::size_t> a, b;
  bool is_embeddings = false;
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
    out.added = TRY(match_pairs(view, names));
    out.replaced = TRY(match_whole(view, names.model));
    out.trained_rows = TRY(match_rows(view, names));
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
                       "of adapters matrices lora_A and lora_B of linear layers and embeddings are known, and weights "
                       "and rows of embeddings that they have whole; --exclude leaves it out");
  }

  Error no_weight(const Tensor& t, const std::string& key, const Translation& names) const {
    const std::string what = tensor_text(t.name) + " changes '" + printable(key) + "', which is not there";
    if (names.model.family && !names.renames())
      return usage_error(root() + ": " + what + " under the source's own names, which this output keeps; " +
                         "--names hf gives it those that adapters know");
    return corrupt(root() + ": an adapter of another model: " + what);
  }

  // Where the tensor that is so is kept.
  std::optional<std::size_t>& slot_of(const Operand& operand) {
    if (operand.kind == Operand::Kind::kWhole) return whole_[operand.of];
    if (operand.kind == Operand::Kind::kRows) return rows_[operand.of];
    Pair& pair = pairs_[operand.of];
    return operand.kind == Operand::Kind::kA ? pair.a : pair.b;
  }

  Status find_operands() {
    const auto& tensors = reader_.catalog().tensors();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& t = tensors[i];
      if (!is_own(t)) continue;
      const Operand operand = operand_of(t.key());
      const bool is_matrix = operand.kind != Operand::Kind::kWhole;
      if (operand.kind == Operand::Kind::kUnknown || (is_matrix && t.shape.rank() != 2) ||
          !can_convert(t.dtype, DType::kFloat32))
        return unknown(t, "");
      std::optional<std::size_t>& slot = slot_of(operand);
      if (slot)
        return unsupported(root() + ": " + tensor_text(tensors[*slot].name) + " and " + tensor_text(t.name) +
                           ": several adapters of one layer; --exclude leaves one of them out");
      slot = i;
      if (operand.is_of_pair()) pairs_[operand.of].is_embeddings = operand.is_embeddings;
    }
    for (const auto& [module, pair] : pairs_) {
      if (!pair.a || !pair.b)
        return corrupt(root() + ": " + tensor_text(tensors[pair.a ? *pair.a : *pair.b].name) + ": its lora_" +
                       (pair.is_embeddings ? "embedding_" : "") + (pair.a ? "B" : "A") + " is not there");
      const Tensor &a = tensors[*pair.a], &b = tensors[*pair.b];
      if (a.shape[0] != b.shape[1] || a.shape[0] < 1)
        return corrupt(root() + ": " + tensor_text(a.name) + " " + to_string(a.shape) + " and " + tensor_text(b.name) +
                       " " + to_string(b.shape) + ": expected as many rows of the one as columns of the other");
      ranks_[a.shape[0]].push_back(module);
    }
    return {};
  }

  Status read_config() {
    std::string path = find_beside(reader_.catalog(), kAdapterConfigFile);
    if (path.empty()) {
      if (!rows_.empty())
        return usage_error(root() + ": its adapter has rows of '" + printable(rows_.begin()->first) +
                           "', and no adapter_config.json beside it says which");
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
      text_ = python_text(plain.set("init_lora_weights", true));
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
    if (!alpha) return corrupt("lora_alpha: expected a number, got nothing");
    alpha_ = TRY(alpha_of(*alpha).context("lora_alpha"));
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
    if (const Json* pattern = json.find("alpha_pattern"); pattern && pattern->is_object())
      for (const Json::Member& m : TRY(pattern->as_object()))
        alphas_.emplace_back(TRY(ModulePattern::parse(m.key).context("alpha_pattern")),
                             TRY(alpha_of(m.value).context("alpha_pattern: " + printable(m.key))));
    if (const Json* rows = json.find("trainable_token_indices"); rows && !rows->is_null()) row_numbers_ = *rows;
    if (const Json* flag = json.find("use_rslora"); flag && flag->is_bool()) rooted_ = TRY(flag->as_bool());
    return {};
  }

  static Result<double> alpha_of(const Json& json) {
    const double alpha = TRY(json.as_double());
    if (!std::isfinite(alpha)) return corrupt("expected a number, got one that is not finite");
    return alpha;
  }

  // The first of the patterns that means it counts.
  float scaling_of(const std::string& module, Index rank) const {
    const auto own =
        std::find_if(alphas_.begin(), alphas_.end(), [&](const auto& a) { return a.first.matches(module); });
    const auto r = static_cast<double>(rank);
    return static_cast<float>((own == alphas_.end() ? alpha_ : own->second) / (rooted_ ? std::sqrt(r) : r));
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
    return python_text(out);
  }

  Result<std::vector<LowRank>> match_pairs(const SourceView& view, const Translation& names) const {
    const Model& model = names.model;
    const auto& tensors = reader_.catalog().tensors();
    const auto& weights = view.catalog.tensors();
    std::vector<LowRank> out;
    for (const auto& [module, pair] : pairs_) {
      const std::string key = module + ".weight";
      const auto weight = find_weight(key, view.catalog, model.family);
      const Tensor &a = tensors[*pair.a], &b = tensors[*pair.b];
      if (!weight) return no_weight(a, key, names);
      TRY(check_untied(a, key, model));
      const Tensor& w = weights[*weight];
      const Dims shape = pair.is_embeddings ? Dims{a.shape[1], b.shape[0]} : Dims{b.shape[0], a.shape[1]};
      if (w.shape != shape)
        return corrupt(root() + ": an adapter of another model: " + tensor_text(b.name) + " " + to_string(b.shape) +
                       " x " + tensor_text(a.name) + " " + to_string(a.shape) + " changes " + tensor_text(w.name) +
                       " " + to_string(w.shape));
      TRY(check_changeable(w));
      const Index rank = a.shape[0];
      out.push_back({*weight, *pair.a, *pair.b, std::nullopt, rank, scaling_of(module, rank), pair.is_embeddings});
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

  // The rows that those of a module's are instead of, of so many.
  Result<std::vector<Index>> row_numbers(const std::string& module, Index of) const {
    const Json* list = &row_numbers_;
    if (row_numbers_.is_object()) {
      const auto members = TRY(row_numbers_.as_object());
      const auto found =
          std::find_if(members.begin(), members.end(), [&](const Json::Member& m) { return module.ends_with(m.key); });
      if (found == members.end()) return corrupt("expected an entry for '" + printable(module) + "', got none");
      list = &found->value;
    }
    std::set<Index> different;
    std::vector<Index> out;
    for (const Json& item : TRY(list->as_array())) {
      const Index row = TRY(item.as_index());
      if (row < 0 || row >= of || !different.insert(row).second)
        return corrupt("expected different rows of " + std::to_string(of) + ", got " + std::to_string(row));
      out.push_back(row);
    }
    return out;
  }

  Result<std::vector<TrainedRows>> match_rows(const SourceView& view, const Translation& names) const {
    const Model& model = names.model;
    std::vector<TrainedRows> out;
    for (const auto& [module, tensor] : rows_) {
      const Tensor& t = reader_.catalog().tensors()[*tensor];
      const auto found = find_weight(module + ".weight", view.catalog, model.family);
      if (!found) return no_weight(t, module + ".weight", names);
      const Tensor& w = view.catalog.tensors()[*found];
      const Index of = w.shape.rank() == 2 ? w.shape[0] : 0;
      const auto rows = TRY(row_numbers(module, of).context(root() + ": trainable_token_indices"));
      if (of == 0 || t.shape != Dims{std::ssize(rows), w.shape[1]})
        return corrupt(root() + ": " + tensor_text(t.name) + " " + to_string(t.shape) + " is to be " +
                       count_of(std::ssize(rows), "row") + " of " + tensor_text(w.name) + " " + to_string(w.shape));
      TRY(check_changeable(w));
      // Rows of an embedding are those of a head that is tied to it, too.
      for (std::size_t i = 0; i < view.catalog.tensors().size(); ++i)
        if (i == *found || (is_tied(module + ".weight", model) && is_tied(view.catalog.tensors()[i].name, model) &&
                            view.catalog.tensors()[i].shape == w.shape))
          out.push_back({i, *tensor, rows});
    }
    return out;
  }

  // Whether a weight is one of those that are one tensor in the model.
  static bool is_tied(const std::string& key, const Model& model) {
    const auto name = model.family ? parse_name(*model.family, key) : std::nullopt;
    return name && name->rule->is_vocabulary() && model.config && model.config->tie_word_embeddings();
  }

  // `t` changes the weight of this key.
  Status check_untied(const Tensor& t, const std::string& key, const Model& model) const {
    if (!is_tied(key, model)) return {};
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
  std::map<std::string, std::optional<std::size_t>> rows_;   // by the module
  std::map<Index, std::vector<std::string>> ranks_;
  std::string text_;
  double alpha_ = 0;
  std::vector<std::pair<ModulePattern, double>> alphas_;  // of modules that have another
  bool rooted_ = false;
  Json row_numbers_ = Json::array();  // trainable_token_indices
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
    return unsupported(root + ": an adapter to a model under " + std::string(info(convention).title) +
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
  for (const TrainedRows& r : trained_rows) out.push_back(r.by);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
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

std::vector<float> transposed(const std::vector<float>& matrix, Index rows) {
  const Index columns = std::ssize(matrix) / rows;
  std::vector<float> out(matrix.size());
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < columns; ++j)
      out[static_cast<std::size_t>(j * rows + i)] = matrix[static_cast<std::size_t>(i * columns + j)];
  return out;
}

}  // namespace

void merge_adapter(const Adapter& adapter, TensorSource& stored, TensorSource& operands, ComputedSource& source) {
  for (const LowRank& m : adapter.added) {
    source.set(m.weight, [&stored, &operands, m](const Box& box, MutableBytes out, MutableBytes scratch) -> Status {
      const DType dtype = stored.catalog().tensors()[m.weight].dtype;
      TRY(m.onto ? read_as(dtype, operands, *m.onto, box, out, scratch) : stored.read(m.weight, box, out, scratch));
      if (box.empty()) return {};
      std::vector<DType> rounded = {operands.catalog().tensors()[m.b].dtype};
      const int rows = m.is_embedding ? 1 : 0, columns = 1 - rows;  // of the weight: the product's
      const auto a = TRY(read_floats(operands, m.a, {{0, box.origin[columns]}, {m.rank, box.shape[columns]}}, scratch));
      const auto b = TRY(read_floats(operands, m.b, {{box.origin[rows], 0}, {box.shape[rows], m.rank}}, scratch));
      if (!m.is_embedding) {
        add_low_rank(out.data(), dtype, b.data(), a.data(), box.shape[0], box.shape[1], m.rank, m.scaling, rounded);
        return {};
      }
      rounded.push_back(dtype);  // as PEFT does to embeddings
      const auto left = transposed(a, m.rank), right = transposed(b, box.shape[1]);
      add_low_rank(out.data(), dtype, left.data(), right.data(), box.shape[0], box.shape[1], m.rank, m.scaling,
                   rounded);
      return {};
    });
  }
  for (const Replaced& r : adapter.replaced) {
    const DType dtype = stored.catalog().tensors()[r.weight].dtype;
    source.set(r.weight, [&operands, r, dtype](const Box& box, MutableBytes out, MutableBytes scratch) {
      return read_as(dtype, operands, r.by, box, out, scratch);
    });
  }
  for (const TrainedRows& r : adapter.trained_rows) {
    source.set(r.weight, [&stored, &operands, r](const Box& box, MutableBytes out, MutableBytes scratch) -> Status {
      TRY(stored.read(r.weight, box, out, scratch));
      const DType dtype = stored.catalog().tensors()[r.weight].dtype;
      const Index row_bytes = box.shape[1] * byte_size(dtype);
      for (std::size_t i = 0; i < r.rows.size(); ++i) {
        const Index at = r.rows[i] - box.origin[0];
        if (at < 0 || at >= box.shape[0] || row_bytes == 0) continue;
        const Box row = {{static_cast<Index>(i), box.origin[1]}, {1, box.shape[1]}};
        const auto begin = static_cast<std::size_t>(at * row_bytes);
        TRY(read_as(dtype, operands, r.by, row, out.subspan(begin, static_cast<std::size_t>(row_bytes)), scratch));
      }
      return {};
    });
  }
}

}  // namespace reshard
