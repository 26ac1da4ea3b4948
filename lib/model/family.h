// Model families: what the parameters of a model are called in each convention, their shapes, how their rows are
// ordered, and how tensor parallelism cuts them. A family is a JSON file (samples/families, family_file.h); what is
// done with it stands beside: view.h brings checkpoints under common names, placement.h lays them out on a mesh.
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

// Who named the parameters. A new one is a value here, in the order of its row in kConventions, and names in the
// families' tables.
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
};
struct ConventionInfo {
  Convention convention = Convention::kHf;
  std::string_view option = {};  // as in --names
  std::string_view title = {};   // "torchtitan names"
  bool extends_hf = false;       // its tables hold what differs from Hugging Face's names, and nothing else
  bool ties_once = false;        // a head that is tied to the embedding has no name of its own
  bool needs_config = false;     // models of several families have the same names: only a config tells which it is
};
// Where names fit several conventions equally well, the first of them counts.
inline constexpr std::array kConventions = {
    // model.layers.0.self_attn.q_proj.weight; ColossalAI's are the same
    ConventionInfo{.convention = Convention::kHf, .option = "hf", .title = "Hugging Face names", .ties_once = true},
    // layers.0.attention.wq.weight, output.weight: until April 2026
    ConventionInfo{.convention = Convention::kTorchtitan, .option = "torchtitan", .title = "torchtitan names"},
    // layers.0.attention.qkv_linear.wq.weight, lm_head.weight
    ConventionInfo{.convention = Convention::kTorchtitan2026, .option = "torchtitan-2026", .title = "torchtitan names"},
    // decoder.layers.0.self_attention.linear_qkv.weight: Megatron core, layers numbered through
    ConventionInfo{
        .convention = Convention::kMegatron, .option = "megatron", .title = "Megatron core names", .ties_once = true},
    // Hugging Face's, but experts fused as transformers 5 has them in memory: mlp.experts.gate_up_proj
    ConventionInfo{.convention = Convention::kTransformers,
                   .option = "transformers",
                   .title = "transformers' run-time names",
                   .extends_hf = true},
    // model.decoder.0.pp_block.attn.qkv_proj.weight
    ConventionInfo{.convention = Convention::kNanotron, .option = "nanotron", .title = "nanotron names"},
    // transformer.h.0.attn.c_attn.weight, as Hugging Face's GPT-2 but [out, in]
    ConventionInfo{.convention = Convention::kNanoGpt, .option = "nanogpt", .title = "nanoGPT names"},
    // blocks.0.attention.w_q.weight; a block's norms may be before its parts or after them
    ConventionInfo{
        .convention = Convention::kOlmoCore, .option = "olmo-core", .title = "OLMo-core names", .needs_config = true},
    // transformer.h.0.attn.qkv.weight, transformer.h.0.norm_1.weight: of models of all families
    ConventionInfo{
        .convention = Convention::kLitGpt, .option = "litgpt", .title = "litgpt names", .needs_config = true},
    // layers.0.attn.q_proj.weight, layers.0.sa_norm.scale: in rotary pairs in some families and not in others
    ConventionInfo{.convention = Convention::kTorchtune,
                   .option = "torchtune",
                   .title = "torchtune names",
                   .ties_once = true,
                   .needs_config = true},
};
constexpr const ConventionInfo& info(Convention c) { return kConventions[static_cast<std::size_t>(c)]; }
std::vector<std::string> convention_options();                       // of all of them
std::optional<Convention> find_convention(std::string_view option);  // "colossalai" too: it has none of its own

// How a tensor of another convention is made of canonical parameters, its parts.
enum class Form {
  kSame,               // is the one part
  kRotaryQuery,        // is the one part, the rows of each of its num_attention_heads heads in rotary pairs
  kRotaryKey,          // the same of num_key_value_heads heads
  kQkvByGroup,         // rows of q, k and v: for each key-value head its query heads, the key, the value
  kRotaryQkvByGroup,   // the same, the rows of each head of q and k in rotary pairs
  kQkv,                // rows of q, then of k, then of v
  kQkvOfGroups,        // the same of one part that has them as kQkvByGroup
  kSections,           // the parts, all of one shape, one after the other along dimension 0
  kStacked,            // the part of every expert, along a new first dimension
  kStackedSections,    // the sections of every expert, along a new first dimension
  kTransposed,         // [out, in] of the part's [in, out], of each expert where they are in one tensor
  kTransposedQkv,      // rows of each head's query, key and value, of [in, q | k | v]; of a bias the same without [in]
  kSection,            // one of the sections of the part along dimension 0: StoredRule::sections
  kTransposedSection,  // the same along its last dimension, transposed in the last two
  kDropped,            // not carried: derived data, or what only its trainer has
};
// Rotary pairs: the rows that a rotary embedding rotates together, 2j and 2j + 1 of a head. Hugging Face has them half
// a head apart: first halves, then second halves.
inline bool is_rotary(Form form) {
  return form == Form::kRotaryQuery || form == Form::kRotaryKey || form == Form::kRotaryQkvByGroup;
}

// How the files of a quantized model hold a parameter.
enum class Quantized {
  kNever,
  kFloat8,  // x as float8, beside x_scale_inv: a float32 for each block
  kMxfp4,  // x [E, in, out] as x_blocks [E, out, in/32, 16], two values a byte, and x_scales [E, out, in/32], exponents
};

// Which layers have a parameter.
enum class Layers {
  kAll,
  kDense,       // whose feed-forward part is one network
  kSparse,      // whose feed-forward part is experts (ModelConfig::is_sparse_layer)
  kLinear,      // whose attention is linear (ModelConfig::is_linear_layer)
  kAttention,   // whose attention is not
  kPrediction,  // after the last, that predict further tokens (ModelConfig::num_prediction_layers)
};

// One parameter, or with "{}" the same one of every layer; a second "{}" stands for the expert.
struct NameRule {
  std::string hf;          // its canonical name
  std::string shape = {};  // formulas over the config, "vocab_size, hidden_size"; empty: see is_dropped()
  int tp_dim = -1;         // the dimension tensor parallelism cuts; -1: every rank holds all of it
  std::string heads = {};  // the member that counts what must not be cut apart along it: "num_key_value_heads"
  Index sections = 1;      // equal parts fused along that dimension, each cut by itself
  enum class Place { kFirst, kLayer, kLast } place = Place::kLayer;  // in a pipeline
  Layers layers = Layers::kAll;
  std::vector<std::pair<std::string, std::string>> shape_of_type = {};  // in layers of a type that have another one
  std::string layer_type = {};  // of those, the layers of this type (ModelConfig::layer_type); empty: all
  std::string when = {};        // a formula that must not be 0, absent members being 0; "!name": that must be 0
  std::string tied_to = {};     // not stored where tie_word_embeddings is set: the same bytes as this one
  std::string dtype = {};       // where it is not the model's
  bool buffer = false;          // no parameter: neither FSDP nor an optimizer touches it
  Quantized quantized = Quantized::kNever;

  bool is_per_expert() const;
  const std::string& shape_in(std::string_view type) const;
  // Derived data that is not carried: a causal mask, the frequencies of a rotary embedding.
  bool is_dropped() const { return shape.empty(); }
  bool is_matrix() const;
  bool stacks_experts() const;  // [E, ., .]
  // Whether its rows (dimension 0) are words.
  bool is_vocabulary() const { return shape.starts_with("vocab_size,"); }
};

// A tensor under a name of another convention. Where several have a part in common, the first is what is written, and
// the others are read as well.
struct StoredRule {
  std::string stored;  // with "{}" as in a NameRule
  Form form = Form::kSame;
  std::vector<std::string> parts;  // NameRule::hf, as many as the form has
  // Of a section: the sizes of all of them, formulas over the config, and which one it is.
  std::vector<std::string> sections = {};
  std::size_t section = 0;
  // Whether its {} numbers the layers that predict further tokens, from 0. Hugging Face numbers them on after the last
  // of the others, so that such names mean something in a numbered() family alone.
  bool of_prediction = false;

  bool is_stacked() const { return form == Form::kStacked || form == Form::kStackedSections; }
  bool is_section() const { return form == Form::kSection || form == Form::kTransposedSection; }
  // Whether the tensor is something else than one canonical parameter under another name.
  bool is_packed() const;
  // Whether the rows of this one of its parts are in rotary pairs.
  bool has_pairs(std::string_view part) const;
};

struct ConventionTable {
  Convention convention = Convention::kHf;
  std::vector<StoredRule> rules;
};

// A number that a config.json may leave out, and what it is then. What the file says is null stays without a value, and
// so does what cannot be computed.
struct ConfigDefault {
  std::string name;
  std::string formula;
};

struct Family {
  std::string name;                      // as in --family
  std::string title;                     // for people
  std::vector<std::string> model_types;  // of config.json
  std::vector<ConfigDefault> defaults;   // in this order
  std::vector<NameRule> rules;
  std::string optional_prefix;       // that Hugging Face names may have before them, or lack: "transformer."
  std::vector<std::string> carried;  // names of what else published files hold, "mtp.*": as it is, unchecked
  // What names begin with in files, and in the memory of transformers: {"visual.", "model.visual."}. The first that
  // fits.
  std::vector<std::pair<std::string, std::string>> in_memory;
  std::vector<ConventionTable> conventions;  // other than Hugging Face's
  // What the names of the family that it extends begin with here, where any family's may stand for it: that of the
  // text_config in a config.json (family_over). Mostly empty.
  std::vector<std::pair<std::string, std::string>> around_text;
  std::string extended;                       // the name of the family that it extends
  std::vector<std::string> text_model_types;  // of its text model, where it is one family over another (family_over)
  Index layers = 0;                           // num_hidden_layers of the model that it is numbered() for; 0: of none

  bool has_convention(Convention convention) const;
  bool knows_model_type(std::string_view model_type) const;
  bool carries(std::string_view parameter) const;  // by its name in files or in memory
};

// Whether the family says what a model quantized as the config has it holds, or the config's is not quantized.
bool knows_quantization(const Family& family, const ModelConfig& config);
// Whether two conventions keep the rows of every parameter in the same order: rotary pairs in both, or in neither.
bool same_row_order(const Family& family, Convention a, Convention b);

// A parameter's name, understood.
struct ParsedName {
  const NameRule* rule = nullptr;      // of a tensor of several parts the first one's
  const StoredRule* stored = nullptr;  // where the name is not Hugging Face's
  Convention convention = Convention::kHf;
  Index layer = -1;
  Index expert = -1;
  std::string_view suffix = {};  // of a tensor that quantized models have instead of the parameter, or beside it

  bool is_packed() const { return stored && stored->is_packed(); }
  bool is_of_quantized() const { return !suffix.empty(); }
};
// Of a plain key (parts.h); looks past the family's own prefix.
std::optional<ParsedName> parse_name(const Family& family, std::string_view name);
// The same of a tensor of that shape, which decides where one name means a parameter in files and the parameter
// transposed in the memory of transformers. A usage error where the config that it is held against is not there,
// unsupported where both are of one shape; `what` is the tensor, for messages.
Result<std::optional<ParsedName>> parse_tensor(const Family& family, std::string_view name, const Dims& shape,
                                               const ModelConfig* config, const std::string& what);
// A pattern with its numbers; those below 0 are left out.
std::string format_pattern(std::string_view pattern, Index layer, Index expert);
// The canonical name of a parameter that is not packed.
std::string canonical_name(const ParsedName& name);
// What a convention stores a canonical parameter as; null for Hugging Face's, and where it has none.
// `layer` tells apart those of layers that predict further tokens.
const StoredRule* stored_rule(const Family& family, const NameRule& rule, Convention convention, Index layer = -1);
// All sections that a convention stores it as, in order; one where it is not stored in sections; none as above.
std::vector<const StoredRule*> stored_sections(const Family& family, const NameRule& rule, Convention convention,
                                               Index layer);
// What a convention calls the tensor of a layer and an expert (-1: of none).
std::string stored_name(const Family& family, const StoredRule& rule, Index layer, Index expert);
// The family for a model of so many layers, where some of its names depend on that; the family itself otherwise. It
// lives as long as the process. Thread-safe.
const Family& numbered(const Family& family, Index layers);
// What the memory of transformers has the parameter transposed as, under the same name, so that only its shape tells
// which of the two it is; null for all others.
const StoredRule* transposed_in_memory(const Family& family, const NameRule& rule);
// Whether it has a name for what `name` is; scales have one in files, and those of float8 in the memory of transformers
// where their matrices are tensors of their own.
bool can_name(const Family& family, const ParsedName& name, Convention convention);

// How tensor parallelism cuts a tensor; dim -1: not.
struct TensorParallelCut {
  int dim = -1;
  std::string_view heads = {};  // as in NameRule
  Index sections = 1;
};
TensorParallelCut tensor_parallel_cut(const ParsedName& name);

// What the names of its layers, those in memory, begin with that a model saved without its head does not have: "model."
// of "model.layers.{}.mlp.up_proj.weight"; empty where nothing is before the layers.
std::string base_prefix(const Family& family);

// A name with the first prefix of `changes` that it begins with, {from, to}, made the other.
std::string replace_prefix(std::string_view name, const std::vector<std::pair<std::string, std::string>>& changes);
// "x.weight" -> "x."
constexpr std::string_view module_of(std::string_view parameter) {
  return parameter.substr(0, parameter.rfind('.') + 1);
}
// What quantized models call the scales and zero points of activations and caches: "input_scale".
std::span<const std::string_view> activation_scales();
// Whether a parameter is one of these: "x.input_scale".
bool is_activation_scale(std::string_view parameter);
// What the names of the two tensors of a parameter in MXFP4 have after its own.
inline constexpr std::string_view kMxfp4Blocks = "_blocks", kMxfp4Scales = "_scales";
inline constexpr Index kMxfp4Group = 32, kMxfp4Bytes = 16;  // values that share a scale, and the bytes they are in

// Names that differ in nothing but the numbers of layers and experts, which all parse alike.
struct AlikeNames {
  std::string example;
  Index count = 0;
};
using NamePatterns = std::map<std::string, AlikeNames, std::less<>>;  // by "layers.{}.mlp.experts.{}.w1"
std::string pattern_of(std::string_view name);
void add_name(NamePatterns& names, std::string name);
Index count_all(const NamePatterns& names);

// The first family of those that know the most of the names as their parameters', or as carried beside them.
struct Known {
  const Family* family = nullptr;
  Index names = 0;
  bool is_all = false;
};
Known best_known(const NamePatterns& names, Families families = {});

// The family that knows the most of a catalog's model tensors, and how they are named; nothing when none knows any.
// The config's model_type decides where it has one that is known. Of families that know equally many, it is the first
// whose shapes do not contradict each other (shapes.h).
struct Detected {
  const Family* family = nullptr;
  Convention convention = Convention::kHf;
};
std::optional<Detected> detect_family(const Catalog& catalog, const ModelConfig* config = nullptr,
                                      Families families = {});
// How a checkpoint's names agree with a family's: an example of each kind of name that the family knows, and of each
// that it does not, and the canonical pattern of each parameter that no name is. `config` tells which parameters the
// model has; null: those that every model of the family has.
struct NameAgreement {
  std::vector<std::string> known, unknown, missing;

  // Whether the names are others', of which some agree by chance: more kinds of names are unknown than known, and as
  // many parameters are missing. Modules beside the model leave none missing, a lost stage none unknown.
  bool is_of_others() const { return std::min(unknown.size(), missing.size()) > known.size(); }
  // Of such: "no tensor is named as in it", "1 kind of name is its ('lm_head.weight'), and 9 are not ('wte.weight',
  // ...)".
  std::string text() const;
};
NameAgreement compare_names(const Family& family, const Catalog& catalog, const ModelConfig* config);
// What the names are of, where that alone keeps detect_family from knowing the model (ConventionInfo::needs_config).
std::optional<Convention> convention_without_config(const Catalog& catalog, Families families = {});
// Whether a family is the one that a config's model_type says, or extends it for models of that type.
bool is_kind_of(const Family& family, const Family& said, const ModelConfig& config);
// How a catalog names this family's parameters; nothing where it has none of them.
std::optional<Convention> detect_convention(const Family& family, const Catalog& catalog);

// A canonical key under another convention's name, a packed tensor's where it becomes part of one: parameters, and
// optimizer keys around them. Unknown ones unchanged.
std::string rename_key(const Family& family, std::string_view canonical_key, Convention convention);
// Any key under its canonical name; a packed tensor's unchanged.
std::string canonical_key(const Family& family, std::string_view key);
// A nested path whose elements held the flattened key `from`, for the key `to`.
KeyPath rename_path(const KeyPath& path, std::string_view from, std::string_view to);

}  // namespace reshard
