// SPDX-License-Identifier: Apache-2.0
// Model families: what the parameters of a model are called in each convention, their shapes, how their rows are
// ordered, and how tensor parallelism cuts them. A family is a JSON file (samples/families, family_file.h). view.h
// translates checkpoints to canonical names, and placement.h lays them out on a mesh.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/state_key.h"
#include "lib/model/config.h"
#include "lib/model/families.h"

namespace reshard {

// The source of a parameter's name. To add one, add a value here in the order of its row in kConventions, and names in
// the families' tables.
enum class Convention {
  kHf,
  kTorchtitan,
  kTorchtitan2026,
  kMegatron,
  kTransformers,
  kNanotron,
  kNanoGpt,
  kOlmoCore,
  kLitGpt,
  kTorchtune,
  kLlamaCpp,
  kMaxText,
  kMaxTextInterleaved,
  kMaxTextUnscanned,
  kMaxTextInterleavedUnscanned,
  kMaxTextLayersFirst,
  kMaxTextInterleavedLayersFirst,
  kLevanter,
  kEasyDel,
  kGemma,
};
struct ConventionInfo {
  Convention convention = Convention::kHf;
  std::string_view option = {};  // as in --names
  std::string_view title = {};   // "torchtitan names"
  bool extends_hf = false;       // its tables only contain the differences from Hugging Face's names
  bool ties_once = false;        // a head tied to the embedding is not stored under a name of its own
  bool keeps_tied_head = false;  // stores numbers under a tied head's name that its models do not use
  bool needs_config = false;     // models of several families have the same names, so only a config tells them apart
  bool must_be_listed = false;   // a family that extends another has it only if its file mentions it
  bool has_twin = false;         // another convention has the same names, and other row orders
  bool pads_vocabulary = false;  // its writers add rows that stand for no token
  bool in_pairs = false;         // rows that its tables call "pairs" are in rotary pairs
  bool layers_apart = false;     // writes each layer under a name of its own if its tables have both
  // The convention whose tables it has, but with the layers along the first axis of each tensor.
  std::optional<Convention> layers_first_of = {};
  // Plain keys of the int32 scalars in which its trainer counts Adam's steps, all with the same number, the optimizer's
  // own first. Empty: a step for each parameter, as in torch.
  std::span<const std::string_view> counters = {};
  std::string_view models = {};  // the models that use it, if another convention has the same names
};
// MaxText's: the counts of optax's ScaleByAdamState and ScaleByScheduleState, and TrainState.step.
inline constexpr std::array<std::string_view, 3> kMaxTextCounters = {
    "optimizer.param_groups.0.step", "extra_state.opt_state.2.count", "extra_state.step"};
// Returns the row of a convention of MaxText's, with what all of them have in common.
constexpr ConventionInfo maxtext_row(ConventionInfo row) {
  row.ties_once = row.needs_config = row.must_be_listed = row.has_twin = row.pads_vocabulary = true;
  row.counters = kMaxTextCounters;
  return row;
}

// If names match several conventions equally well, the first one counts.
inline constexpr std::array kConventions = {
    // model.layers.0.self_attn.q_proj.weight; also ColossalAI's
    ConventionInfo{.convention = Convention::kHf, .option = "hf", .title = "Hugging Face names", .ties_once = true},
    // layers.0.attention.wq.weight, output.weight: until April 2026
    ConventionInfo{.convention = Convention::kTorchtitan, .option = "torchtitan", .title = "torchtitan names"},
    // layers.0.attention.qkv_linear.wq.weight, lm_head.weight
    ConventionInfo{.convention = Convention::kTorchtitan2026, .option = "torchtitan-2026", .title = "torchtitan names"},
    // decoder.layers.0.self_attention.linear_qkv.weight: Megatron core with continuous layer numbers
    ConventionInfo{.convention = Convention::kMegatron,
                   .option = "megatron",
                   .title = "Megatron core names",
                   .ties_once = true,
                   .pads_vocabulary = true},
    // Hugging Face's, but with fused experts as in transformers 5's memory: mlp.experts.gate_up_proj
    ConventionInfo{.convention = Convention::kTransformers,
                   .option = "transformers",
                   .title = "transformers' run-time names",
                   .extends_hf = true},
    // model.decoder.0.pp_block.attn.qkv_proj.weight
    ConventionInfo{.convention = Convention::kNanotron, .option = "nanotron", .title = "nanotron names"},
    // transformer.h.0.attn.c_attn.weight, like Hugging Face's GPT-2 but [out, in]
    ConventionInfo{.convention = Convention::kNanoGpt, .option = "nanogpt", .title = "nanoGPT names"},
    // blocks.0.attention.w_q.weight; a block's norms are before or after its parts
    ConventionInfo{
        .convention = Convention::kOlmoCore, .option = "olmo-core", .title = "OLMo-core names", .needs_config = true},
    // transformer.h.0.attn.qkv.weight, transformer.h.0.norm_1.weight: the same for all families
    ConventionInfo{
        .convention = Convention::kLitGpt, .option = "litgpt", .title = "litgpt names", .needs_config = true},
    // layers.0.attn.q_proj.weight, layers.0.sa_norm.scale: rows in rotary pairs in some families only
    ConventionInfo{.convention = Convention::kTorchtune,
                   .option = "torchtune",
                   .title = "torchtune names",
                   .ties_once = true,
                   .needs_config = true},
    // blk.0.attn_q.weight: rows in rotary pairs in some families only
    ConventionInfo{.convention = Convention::kLlamaCpp,
                   .option = "gguf",
                   .title = "GGUF names",
                   .ties_once = true,
                   .needs_config = true,
                   .must_be_listed = true},
    // decoder.layers.self_attention.query.kernel, with all layers along its second axis; the model names are MaxText's
    maxtext_row({.convention = Convention::kMaxText,
                 .option = "maxtext",
                 .title = "MaxText names",
                 .models = "MaxText's llama2, llama3 and llama3.3 models"}),
    maxtext_row({.convention = Convention::kMaxTextInterleaved,
                 .option = "maxtext-interleaved",
                 .title = "MaxText names, with rotary pairs",
                 .in_pairs = true,
                 .models = "MaxText's llama3.1 models"}),
    // decoder.layers_0.self_attention.query.kernel (scan_layers=false)
    maxtext_row({.convention = Convention::kMaxTextUnscanned,
                 .option = "maxtext-unscanned",
                 .title = "MaxText names, layers not scanned",
                 .layers_apart = true}),
    maxtext_row({.convention = Convention::kMaxTextInterleavedUnscanned,
                 .option = "maxtext-interleaved-unscanned",
                 .title = "MaxText names, with rotary pairs, layers not scanned",
                 .in_pairs = true,
                 .layers_apart = true}),
    // As kMaxText and kMaxTextInterleaved, with all layers along the first axis (param_scan_axis=0)
    maxtext_row({.convention = Convention::kMaxTextLayersFirst,
                 .option = "maxtext-layers-first",
                 .title = "MaxText names, layers first",
                 .layers_first_of = Convention::kMaxText}),
    maxtext_row({.convention = Convention::kMaxTextInterleavedLayersFirst,
                 .option = "maxtext-interleaved-layers-first",
                 .title = "MaxText names, with rotary pairs, layers first",
                 .in_pairs = true,
                 .layers_first_of = Convention::kMaxTextInterleaved}),
    // transformer.layers.stacked.self_attn.q_proj.weight, with all layers along its first axis and heads apart
    ConventionInfo{.convention = Convention::kLevanter,
                   .option = "levanter",
                   .title = "Levanter names",
                   .ties_once = true,
                   .needs_config = true,
                   .must_be_listed = true,
                   .pads_vocabulary = true},
    // model.layers.0.self_attn.q_proj.kernel: Hugging Face's, but [in, out], and with stacked experts
    ConventionInfo{.convention = Convention::kEasyDel,
                   .option = "easydel",
                   .title = "EasyDeL names",
                   .ties_once = true,
                   .keeps_tied_head = true,
                   .needs_config = true,
                   .must_be_listed = true},
    // layer_0.attn.q_einsum.w, with heads apart: those of Google's gemma library
    ConventionInfo{.convention = Convention::kGemma,
                   .option = "gemma",
                   .title = "Gemma library names",
                   .ties_once = true,
                   .needs_config = true,
                   .must_be_listed = true,
                   .layers_apart = true},
};
constexpr const ConventionInfo& info(Convention c) { return kConventions[static_cast<std::size_t>(c)]; }
std::vector<std::string> convention_options();                       // of all conventions
std::optional<Convention> find_convention(std::string_view option);  // also "colossalai", which has no names of its own

// How a tensor of another convention consists of canonical parameters, its parts.
enum class Form {
  kSame,               // the one part, unchanged
  kRotaryQuery,        // the one part, with the rows of each of num_attention_heads heads in rotary pairs
  kRotaryKey,          // the same for num_key_value_heads heads
  kQkvByGroup,         // rows of q, k and v: for each key-value head its query heads, the key, the value
  kRotaryQkvByGroup,   // the same, with the rows of each head of q and k in rotary pairs
  kQkv,                // rows of q, then of k, then of v
  kQkvOfGroups,        // the same from one part, which is in the order of kQkvByGroup
  kSections,           // the parts, of equal shape, concatenated along dimension 0
  kStacked,            // the part of every expert, along a new first dimension
  kStackedSections,    // the sections of every expert, along a new first dimension
  kTransposed,         // [out, in] of the part's [in, out], for each expert if they are in one tensor
  kTransposedQkv,      // rows of each head's query, key and value, of [in, q | k | v]; a bias has no [in]
  kSection,            // one section of the part along dimension 0: StoredRule::sections
  kTransposedSection,  // the same along its last dimension, with the last two dimensions transposed
  kAxes,               // the axes of the part in another order, split, and with those of layers and experts between
  kDropped,            // not carried: derived data, or data that only its trainer uses
};
// Rotary pairs are the rows that a rotary embedding rotates together, stored as rows 2j and 2j + 1 of a head. Hugging
// Face stores them half a head apart: first halves, then second halves.
inline bool is_rotary(Form form) {
  return form == Form::kRotaryQuery || form == Form::kRotaryKey || form == Form::kRotaryQkvByGroup;
}

// How the files of a quantized model store a parameter.
enum class Quantized {
  kNever,
  kFloat8,  // x as float8, and x_scale_inv with a float32 for each block
  // x [E, in, out] as x_blocks [E, out, in/32, 16], two values per byte, and exponents x_scales [E, out, in/32].
  kMxfp4,
};

// The layers that have a parameter.
enum class Layers {
  kAll,
  kDense,       // with a single feed-forward network
  kSparse,      // with experts (ModelConfig::is_sparse_layer())
  kLinear,      // with linear attention (ModelConfig::is_linear_layer())
  kAttention,   // with other attention
  kPrediction,  // after the last layer, for further tokens (ModelConfig::num_prediction_layers())
};

// One parameter or, with "{}", the same parameter of every layer. A second "{}" is the expert.
struct NameRule {
  std::string hf;          // its canonical name
  std::string shape = {};  // formulas over the config, "vocab_size, hidden_size"; empty: see is_dropped()
  int tp_dim = -1;         // the dimension that tensor parallelism cuts; -1: every rank holds all of it
  std::string heads = {};  // the number of units along it that must not be split: "num_key_value_heads"
  Index sections = 1;      // equal parts fused along that dimension, each cut separately
  enum class Place { kFirst, kLayer, kLast } place = Place::kLayer;  // position in a pipeline
  Layers layers = Layers::kAll;
  std::vector<std::pair<std::string, std::string>> shape_of_type = {};  // other shapes in layers of a type
  std::string layer_type = {};  // restricts it to the layers of this type (ModelConfig::layer_type()); empty: all
  std::string when = {};        // only if this formula is not 0, with absent members as 0; "!name": only if that is 0
  std::string tied_to = {};     // if tie_word_embeddings is set, not stored but the same bytes as this parameter
  std::string dtype = {};       // if it differs from the model's
  bool buffer = false;          // not a parameter: ignored by FSDP and optimizers
  Quantized quantized = Quantized::kNever;

  bool is_per_expert() const;
  const std::string& shape_in(std::string_view type) const;
  // Returns whether it is derived data that is not carried: a causal mask, the frequencies of a rotary embedding.
  bool is_dropped() const { return shape.empty(); }
  bool is_matrix() const;
  bool stacks_experts() const;  // [E, ., .]
  // Returns whether its rows (dimension 0) are words.
  bool is_vocabulary() const { return shape.starts_with("vocab_size,"); }
};

// An axis of a stored tensor of Form::kAxes.
struct StoredAxis {
  enum class Of { kPart, kLayers, kExperts, kParts } of = Of::kPart;  // kParts: which of the rule's parts
  int dim = -1;           // of the part. Two axes of one dimension are its quotient and its remainder, in this order
  std::string size = {};  // of a quotient, a formula: "num_attention_heads"

  bool operator==(const StoredAxis&) const = default;
};

// The layers that a stored tensor, or the number in its name, counts: number n is layer first + n * step + block.
struct LayerSeries {
  Index block = 0, step = 1;
  std::string from = {}, to = {};  // formulas of the first layer and of the end; empty: 0 and num_hidden_layers
  Index first = 0, end = -1;       // their values in a numbered() family; an end of -1 is not known

  Index layer(Index number) const { return first + number * step + block; }
  Index number(Index layer) const { return (layer - first - block) / step; }
  bool has(Index layer) const {
    return layer >= first + block && (end < 0 || layer < end) && (layer - first - block) % step == 0;
  }
  Index count() const { return end <= first + block ? 0 : ceil_div(end - first - block, step); }
  bool operator==(const LayerSeries&) const = default;
};

// How the stored values differ from those of the part. They are computed in float32.
struct ValueChange {
  enum class Kind { kNone, kPlusOne, kTimesRoot, kOverRoot } kind = Kind::kNone;
  std::string of = {};          // the root of this formula
  bool rounds_to_bf16 = false;  // the root is rounded to bfloat16 first

  bool operator==(const ValueChange&) const = default;
};

// A tensor with a name of another convention. If several contain the same part, the first is written, and the others
// are also read.
struct StoredRule {
  std::string stored;  // with "{}" as in NameRule
  Form form = Form::kSame;
  std::vector<std::string> parts;  // canonical names (NameRule::hf), as many as the form has
  // For a section: formulas for the sizes of all sections, and the index of this one.
  std::vector<std::string> sections = {};
  std::size_t section = 0;
  // Whether its {} numbers the layers that predict further tokens, from 0. Hugging Face continues the numbers of the
  // other layers, so such names can only be translated in a numbered() family.
  bool of_prediction = false;
  // For kAxes. With `columns` > 1 it has one of so many columns of the part's last dimension, from `section` on.
  std::vector<StoredAxis> axes = {};
  Index columns = 1;
  bool pairs = false;  // the remainder of a split axis is in rotary pairs
  LayerSeries layers = {};
  ValueChange change = {};

  bool is_stacked() const { return form == Form::kStacked || form == Form::kStackedSections; }
  bool has_axis(StoredAxis::Of of) const;
  bool has_layers() const { return has_axis(StoredAxis::Of::kLayers); }  // several along an axis
  void put_layers_first();                                               // moves that axis
  bool has_experts() const { return is_stacked() || has_axis(StoredAxis::Of::kExperts); }
  bool is_section() const { return form == Form::kSection || form == Form::kTransposedSection || columns > 1; }
  std::size_t section_count() const { return columns > 1 ? static_cast<std::size_t>(columns) : sections.size(); }
  // Returns whether the tensor is not just one canonical parameter with another name.
  bool is_packed() const;
  // Returns whether the rows of this part are in rotary pairs.
  bool has_pairs(std::string_view part) const;
};

struct ConventionTable {
  Convention convention = Convention::kHf;
  std::vector<StoredRule> rules;
};

// The value of a number that a config.json leaves out. A number that is null in the file stays without a value, and so
// does one that cannot be computed.
struct ConfigDefault {
  std::string name;
  std::string formula;
};

struct Family {
  std::string name;                      // as in --family
  std::string title;                     // for people
  std::vector<std::string> model_types;  // in config.json
  std::vector<ConfigDefault> defaults;   // applied in this order
  std::vector<NameRule> rules;
  std::string optional_prefix;       // prefix that Hugging Face names may have or lack: "transformer."
  std::vector<std::string> carried;  // patterns of other names in published files, "mtp.*": copied unchecked
  // Prefixes of names in files and in transformers' memory: {"visual.", "model.visual."}. The first that matches
  // applies.
  std::vector<std::pair<std::string, std::string>> in_memory;
  std::vector<ConventionTable> conventions;  // without Hugging Face's
  // Replacements for name prefixes of the extended family, if the family wraps the text_config's family, whichever that
  // is (family_over()). Usually empty.
  std::vector<std::pair<std::string, std::string>> around_text;
  std::string extended;                       // name of the family that it extends
  std::vector<std::string> text_model_types;  // of its text model, if it is one family over another (family_over())
  Index layers = 0;                           // num_hidden_layers of the model if it is numbered(), otherwise 0
  // A table of the user's own classes (architecture.h), for --family-file. Then there are no rules and no model_types.
  std::string class_table;

  bool has_convention(Convention convention) const;
  bool knows_model_type(std::string_view model_type) const;
  bool carries(std::string_view parameter) const;  // takes names in files and in memory
};

// Returns whether the family describes what the config's quantization stores, or the config is not quantized.
bool knows_quantization(const Family& family, const ModelConfig& config);
// Returns whether two conventions store the rows of every parameter in the same order: in both in rotary pairs, or in
// neither.
bool same_row_order(const Family& family, Convention a, Convention b);

// A parsed parameter name.
struct ParsedName {
  const NameRule* rule = nullptr;      // if the tensor has several parts, the rule of the first
  const StoredRule* stored = nullptr;  // null for Hugging Face names
  Convention convention = Convention::kHf;
  Index layer = -1;
  Index expert = -1;
  std::string_view suffix = {};  // of a tensor that a quantized model stores instead of the parameter or next to it

  bool is_packed() const { return stored && stored->is_packed(); }
  bool is_of_quantized() const { return !suffix.empty(); }
};
// Parses a plain key (parts.h). Ignores the family's optional_prefix.
std::optional<ParsedName> parse_name(const Family& family, std::string_view name);
// Parses the name of a tensor of this shape. The shape decides if a name means a parameter in files and its transpose
// in transformers' memory. A usage error if that needs a config and there is none; unsupported if both have the same
// shape. `what` is the tensor in messages.
Result<std::optional<ParsedName>> parse_tensor(const Family& family, std::string_view name, const Dims& shape,
                                               const ModelConfig* config, const std::string& what);
// Fills in the numbers of a pattern; numbers below 0 are left out.
std::string format_pattern(std::string_view pattern, Index layer, Index expert);
// Returns the canonical name of a parameter that is not packed.
std::string canonical_name(const ParsedName& name);
// Returns how a convention stores a canonical parameter, or null for Hugging Face's convention or if it has no name for
// it. `layer` distinguishes layers that predict further tokens.
const StoredRule* stored_rule(const Family& family, const NameRule& rule, Convention convention, Index layer = -1);
// Returns all sections in which a convention stores it, in order; one entry if it is not stored in sections; none as
// above.
std::vector<const StoredRule*> stored_sections(const Family& family, const NameRule& rule, Convention convention,
                                               Index layer);
// Returns the convention's name of the tensor for a layer and an expert (-1: none).
std::string stored_name(const Family& family, const StoredRule& rule, Index layer, Index expert);
// Returns the family for the config's model if some of its names depend on the numbers of layers, otherwise the family
// itself, as without a config. The result lives as long as the process. Thread-safe.
const Family& numbered(const Family& family, const ModelConfig* config);
// Returns the rule of a parameter that transformers' memory stores transposed under the same name, so that only its
// shape tells the two apart; null for all others.
const StoredRule* transposed_in_memory(const Family& family, const NameRule& rule);
// Returns whether the convention has a name for `name`. Scales have one in files; float8 scales also have one in
// transformers' memory if their matrices are separate tensors.
bool can_name(const Family& family, const ParsedName& name, Convention convention);

// How tensor parallelism cuts a tensor. dim -1: not at all.
struct TensorParallelCut {
  int dim = -1;
  std::string_view heads = {};  // as in NameRule
  Index sections = 1;
};
TensorParallelCut tensor_parallel_cut(const ParsedName& name);

// Returns the prefix of the layers' in-memory names that a model saved without its head lacks: "model." of
// "model.layers.{}.mlp.up_proj.weight". Empty if there is none.
std::string base_prefix(const Family& family);

// Replaces the first prefix of `changes`, {from, to}, with which the name begins.
std::string replace_prefix(std::string_view name, const std::vector<std::pair<std::string, std::string>>& changes);
// "x.weight" -> "x."
constexpr std::string_view module_of(std::string_view parameter) {
  return parameter.substr(0, parameter.rfind('.') + 1);
}
// The names of scales and zero points of activations and caches in quantized models: "input_scale".
std::span<const std::string_view> activation_scales();
// Returns whether a parameter is one of these: "x.input_scale".
bool is_activation_scale(std::string_view parameter);
// The suffixes of the two tensors of a parameter in MXFP4.
inline constexpr std::string_view kMxfp4Blocks = "_blocks", kMxfp4Scales = "_scales";
inline constexpr Index kMxfp4Group = 32, kMxfp4Bytes = 16;  // values that share a scale, and the bytes that hold them

// Names that differ only in the numbers of layers and experts, so that they all parse alike.
struct AlikeNames {
  std::string example;
  Index count = 0;
};
using NamePatterns = std::map<std::string, AlikeNames, std::less<>>;  // keyed by "layers.{}.mlp.experts.{}.w1"
std::string pattern_of(std::string_view name);
void add_name(NamePatterns& names, std::string name);
Index count_all(const NamePatterns& names);

// The family that recognises the most names, as parameters or as carried tensors; ties go to the earlier one.
struct FamilyMatch {
  const Family* family = nullptr;
  Index names = 0;
  bool is_all = false;
};
FamilyMatch best_known(const NamePatterns& names, Families families = {});

// Detects the family that recognises the most model tensors of a catalog, and their convention; nothing if none
// recognises any. A known model_type in the config decides. Ties go to the first family whose shapes do not contradict
// each other (shapes.h).
struct DetectedFamily {
  const Family* family = nullptr;
  Convention convention = Convention::kHf;
};
std::optional<DetectedFamily> detect_family(const Catalog& catalog, const ModelConfig* config = nullptr,
                                            Families families = {});
// How a checkpoint's names match a family's: an example of each kind of name that the family knows and that it does not
// know, and the canonical patterns of the parameters that are missing. With `config`, of the parameters that this model
// has; if null, of those that every model of the family has.
struct NameAgreement {
  std::vector<std::string> known, unknown, missing;

  // Returns whether the names belong to another model, and some match by chance: more kinds of names are unknown than
  // known, and as many parameters are missing. (Additional modules leave no parameter missing, and a lost stage leaves
  // no name unknown.)
  bool is_of_others() const { return std::min(unknown.size(), missing.size()) > known.size(); }
  // Describes such a mismatch: "no tensor name matches it", "1 kind of name matches ('lm_head.weight'), and 9 do not
  // ('wte.weight', ...)".
  std::string text() const;
};
NameAgreement compare_names(const Family& family, const Catalog& catalog, const ModelConfig* config);
// Returns the convention of the names if the lack of a config is the only reason why detect_family() finds no family
// (ConventionInfo::needs_config).
std::optional<Convention> convention_without_config(const Catalog& catalog, Families families = {});
// Returns whether `family` is the one for the config's model_type (`said`) or extends that for models of this type.
bool is_kind_of(const Family& family, const Family& said, const ModelConfig& config);
// Returns the convention in which a catalog names this family's parameters, or nothing if it has none of them.
std::optional<Convention> detect_convention(const Family& family, const Catalog& catalog);
// Returns the other conventions of the family that know as many of the catalog's names as `convention`.
std::vector<Convention> alike_conventions(const Family& family, const Catalog& catalog, Convention convention);

// Translates a canonical key to another convention; a parameter that becomes part of a packed tensor gets that tensor's
// name. Handles parameters and optimizer keys around them. Unknown keys are unchanged.
std::string rename_key(const Family& family, std::string_view canonical_key, Convention convention);
// Translates any key to its canonical name; a packed tensor's key is unchanged.
std::string canonical_key(const Family& family, std::string_view key);
// Changes a nested path whose elements spell the flattened key `from` to spell `to`.
KeyPath rename_path(const KeyPath& path, std::string_view from, std::string_view to);

}  // namespace reshard
