// SPDX-License-Identifier: Apache-2.0
#include "formats/megatron/names.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "formats/encoding/pickle_writer.h"
#include "lib/base/checked.h"
#include "lib/base/text.h"

namespace reshard::megatron {
namespace {

// Takes a number and the dot after it.
std::optional<Index> take_part(std::string_view& text) {
  std::string_view rest = text;
  const auto n = take_number(rest);
  if (!n || !take(rest, ".")) return std::nullopt;
  text = rest;
  return n;
}

// Returns "linear_fc1" for "decoder.layers.0.mlp.linear_fc1.weight".
std::string_view module_of(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return {};
  const std::string_view module = name.substr(0, dot);
  return module.substr(module.rfind('.') + 1);  // npos + 1 is 0
}
std::string_view member_of(std::string_view name) { return name.substr(name.rfind('.') + 1); }

template <std::size_t N>
bool is_one_of(std::string_view word, const std::array<std::string_view, N>& words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

}  // namespace

std::string core_name(std::string_view stored) {
  constexpr std::array<std::string_view, 2> kStacks = {"encoder.", "transformer."};
  std::string_view rest = stored;
  if (rest == "word_embeddings_for_head.weight") return std::string(kHead);
  if (!take(rest, "language_model.")) return std::string(stored);
  for (const std::string_view stack : kStacks) {
    if (!take(rest, stack)) continue;
    if (take(rest, "final_norm.") || take(rest, "final_layernorm."))
      return "decoder.final_layernorm." + std::string(rest);
    if (!take(rest, "layers.")) return std::string(stored);
    static constexpr std::array<std::array<std::string_view, 2>, 9> kModules = {{
        {"attention.query_key_value.", "self_attention.linear_qkv."},
        {"attention.dense.", "self_attention.linear_proj."},
        {"self_attention.query_key_value.", "self_attention.linear_qkv."},
        {"self_attention.dense.", "self_attention.linear_proj."},
        {"mlp.dense_h_to_4h.", "mlp.linear_fc1."},
        {"mlp.dense_4h_to_h.", "mlp.linear_fc2."},
        {"input_norm.", "input_layernorm."},
        {"post_attention_norm.", "pre_mlp_layernorm."},
        {"post_attention_layernorm.", "pre_mlp_layernorm."},
    }};
    const std::size_t dot = rest.find('.');
    std::string out = std::string(kLayers) + std::string(rest.substr(0, dot + 1));
    rest.remove_prefix(std::min(rest.size(), dot + 1));
    for (const auto& [old, core] : kModules)
      if (take(rest, old)) return out + std::string(core) + std::string(rest);
    return out + std::string(rest);
  }
  return std::string(rest);  // embedding..., output_layer...
}

bool is_extra_state(std::string_view name) { return name.find("._extra_state") != std::string_view::npos; }

std::string none_in_a_list() {
  pickle::PickleWriter w;
  {
    const pickle::List list(w);
    w.none();
  }
  return std::move(w).finish();
}

// ---- numbers

CoreName parse_core_name(std::string_view name) {
  CoreName out;
  std::string_view rest = name;
  if (take(rest, kLayers)) {
    out.layer = take_part(rest);
    if (!out.layer) rest = name;
  }
  constexpr std::string_view kLocal = "experts.local_experts.", kGrouped = "experts.linear_fc";
  if (const std::size_t at = rest.find(kLocal); at != std::string_view::npos) {
    std::string_view after = rest.substr(at + kLocal.size());
    if (const auto expert = take_part(after)) {
      out.expert = expert;
      out.before_expert = rest.substr(0, at + kLocal.size());
      out.after_expert = "." + std::string(after);
      return out;
    }
  }
  if (rest.find(kGrouped) != std::string_view::npos) {  // "linear_fc1.weight3"
    const std::size_t digits = rest.find_last_not_of("0123456789") + 1;
    if (const auto expert = parse_number(rest.substr(digits))) {
      out.expert = expert;
      out.before_expert = rest.substr(0, digits);
      return out;
    }
  }
  out.before_expert = rest;
  return out;
}

std::string name_in(const Modules& modules, std::string_view name, bool has_experts) {
  static constexpr std::array<std::array<std::string_view, 2>, 2> kNorms = {
      {{"input_layernorm.", "self_attention.linear_qkv.layer_norm_"},
       {"pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"}}};
  static constexpr std::string_view kGrouped = "experts.", kLocal = "experts.local_experts.";
  CoreName core = parse_core_name(name);
  if (core.is_expert()) {
    const std::size_t at = core.before_expert.find(kGrouped);
    const bool is_local = core.before_expert.substr(at).starts_with(kLocal);
    const std::string front = core.before_expert.substr(0, at);
    if (is_local && modules.grouped_experts) {
      core.before_expert = front + std::string(kGrouped) + core.after_expert.substr(1);
      core.after_expert.clear();
    } else if (!is_local && !modules.grouped_experts) {
      core.after_expert = "." + core.before_expert.substr(at + kGrouped.size());
      core.before_expert = front + std::string(kLocal);
    }
  }
  for (const auto& [apart, inside] : kNorms) {
    const bool is_before_experts = has_experts && apart == kNorms[1][0];
    const std::string_view wanted = !modules.norms_inside || is_before_experts ? apart : inside;
    std::string_view rest = core.before_expert;
    if (core.layer && (take(rest, apart) || take(rest, inside))) {
      core.before_expert = std::string(wanted) + std::string(rest);
      break;
    }
  }
  return core.text();
}

std::string CoreName::text() const {
  return (layer ? std::string(kLayers) + std::to_string(*layer) + "." : "") + before_expert +
         (expert ? std::to_string(*expert) : "") + after_expert;
}

// ---- cuts

std::optional<Cut> cut_of(std::string_view name, bool gated) {
  static constexpr std::array<std::string_view, 8> kColumn = {
      "word_embeddings",  "output_layer",      "linear_qkv", "linear_q_proj",
      "linear_q_up_proj", "linear_kv_up_proj", "linear_fc1", "linear_q"};
  static constexpr std::array<std::string_view, 2> kRow = {"linear_proj", "linear_fc2"};
  static constexpr std::array<std::string_view, 5> kWhole = {"position_embeddings", "router", "shared_experts",
                                                             "linear_q_down_proj", "linear_kv_down_proj"};
  const std::string_view module = module_of(name), member = member_of(name);
  if (module.find("norm") != std::string_view::npos || member.find("norm") != std::string_view::npos ||
      is_one_of(module, kWhole))
    return Cut{};
  const bool is_weight = member.starts_with("weight");
  if (!is_weight && !member.starts_with("bias")) return std::nullopt;
  if (is_one_of(module, kColumn)) return Cut{0, gated && module == "linear_fc1"};
  if (is_one_of(module, kRow)) return is_weight ? Cut{1, false} : Cut{};
  return std::nullopt;
}

namespace {

Status check_cut(const Cut& cut, const Dims& shape, Index pieces) {
  if (cut.dim < shape.rank() && (cut.dim < 0 || shape[cut.dim] % pieces == 0)) return {};
  return corrupt("expected " +
                 (cut.dim < shape.rank() ? "a multiple of " + count_of(pieces, "row") + " or columns"
                                         : count_of(cut.dim + 1, "dimension")) +
                 ", got shape " + to_string(shape));
}

}  // namespace

Result<Dims> whole_shape(const Cut& cut, const Dims& local, Index ranks) {
  TRY(check_cut(cut, local, cut.is_gated ? 2 : 1));
  Dims out = local;
  if (cut.dim < 0) return out;
  const auto size = checked_mul(local[cut.dim], ranks);
  if (!size) return corrupt("a part of shape " + to_string(local) + " of " + with_commas(ranks));
  out[cut.dim] = *size;
  if (!checked_volume(out)) return corrupt("a part of shape " + to_string(local) + " of " + with_commas(ranks));
  return out;
}

Result<Dims> local_shape(const Cut& cut, const Dims& shape, Index ranks) {
  TRY(check_cut(cut, shape, cut.is_gated ? 2 * ranks : ranks));
  Dims out = shape;
  if (cut.dim >= 0) out[cut.dim] /= ranks;
  return out;
}

std::vector<LocalBox> parts_of_rank(const Cut& cut, const Dims& local, Index rank, Index ranks) {
  LocalBox part{whole(local), Dims::filled(local.rank(), 0)};
  if (cut.dim < 0) return {part};
  const int d = cut.dim;
  if (!cut.is_gated) {
    part.box.origin[d] = rank * local[d];
    return {part};
  }
  const Index half = local[d] / 2;
  part.box.shape[d] = half;
  part.box.origin[d] = rank * half;
  LocalBox up = part;
  up.at[d] = half;
  up.box.origin[d] = (ranks + rank) * half;
  return {part, up};
}

// ---- order

namespace {

// The modules of a layer in the order of the model. torch_dist names norms as if they were inside the linear layers,
// with either implementation.
struct Module {
  std::string_view part;  // of the parameter's name
  int local = 0, inside = 0;
};
constexpr std::array<Module, 11> kModules = {{
    {".input_layernorm.", 0, 0},
    {".self_attention.linear_proj.", 1, 1},
    {".self_attention.linear_qkv.layer_norm_", 0, 2},
    {".self_attention.linear_qkv.", 2, 2},
    {".q_layernorm.", 3, 3},
    {".k_layernorm.", 4, 4},
    {".pre_mlp_layernorm.", 5, 5},
    {".mlp.linear_fc1.layer_norm_", 5, 6},
    {".mlp.linear_fc1.", 6, 6},
    {".mlp.linear_fc2.", 7, 7},
    {".mlp.router.", 8, 8},
}};
constexpr int kExperts = 9, kOther = 10;

}  // namespace

std::vector<std::string> in_model_order(std::vector<std::string> names, const Modules& modules) {
  // The sort key: outside the layers or the layer, the module, the matrix and number of an expert, and the kind of
  // parameter.
  using Place = std::tuple<int, Index, int, Index, Index, int>;
  const auto place = [&](std::string_view name) -> Place {
    const CoreName core = parse_core_name(name);
    const std::string_view member = member_of(name);
    const int kind = member.find("norm") != std::string_view::npos ? 0 : member.starts_with("weight") ? 1 : 2;
    if (!core.layer) {
      const int side = name.starts_with("embedding.") ? 0 : name == kHead ? 3 : 2;
      return {side, 0, name.find("position") != std::string_view::npos, 0, 0, kind};
    }
    if (core.expert) {
      const Index matrix = name.find("linear_fc2") != std::string_view::npos;
      return {1,
              *core.layer,
              kExperts,
              modules.grouped_experts ? matrix : *core.expert,
              modules.grouped_experts ? *core.expert : matrix,
              kind};
    }
    const auto* module = std::find_if(kModules.begin(), kModules.end(),
                                      [&](const Module& m) { return name.find(m.part) != std::string_view::npos; });
    const int number = module == kModules.end() ? kOther : modules.norms_inside ? module->inside : module->local;
    return {1, *core.layer, number, 0, 0, kind};
  };
  std::stable_sort(names.begin(), names.end(), [&](const auto& a, const auto& b) { return place(a) < place(b); });
  return names;
}

// ---- optimizer state

std::string state_name(std::string_view parameter, std::string_view word) {
  return "optimizer.state." + std::string(parameter) + "." + std::string(word);
}

KeyPath state_path(std::string_view parameter, std::string_view word) {
  return {std::string("optimizer"), std::string("state"), std::string(parameter), std::string(word)};
}

std::string state_word(std::string_view stored) { return std::string(stored == "param" ? kMaster : stored); }

}  // namespace reshard::megatron
