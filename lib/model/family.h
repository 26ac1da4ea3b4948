// Model families: what the parameters of a model are called in each convention, their shapes, how their rows are
// ordered, and how tensor parallelism cuts them. A family is a table in a file of its own (llama.cc); what is done with
// it stands beside: view.h brings checkpoints under common names, placement.h lays them out on a mesh.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/state_key.h"
#include "lib/model/config.h"

namespace reshard {

// Who named the parameters.
enum class Convention {
  kHf,              // model.layers.0.self_attn.q_proj.weight; ColossalAI's are the same
  kTorchtitan,      // layers.0.attention.wq.weight, output.weight: until April 2026
  kTorchtitan2026,  // layers.0.attention.qkv_linear.wq.weight, lm_head.weight
  kMegatron,        // decoder.layers.0.self_attention.linear_qkv.weight: Megatron core, layers numbered through
};
inline constexpr std::array kConventions = {Convention::kHf, Convention::kTorchtitan, Convention::kTorchtitan2026,
                                            Convention::kMegatron};
std::string_view convention_title(Convention convention);            // "torchtitan names"
std::string_view convention_option(Convention convention);           // "torchtitan-2026", as in --names
std::optional<Convention> find_convention(std::string_view option);  // "colossalai" too: it has none of its own
// Torchtitan keeps the rows of q and k as its rotary embedding wants them (pairs side by side), others as Hugging Face
// does (first halves, then second halves).
inline bool has_rotary_pairs(Convention convention) {
  return convention == Convention::kTorchtitan || convention == Convention::kTorchtitan2026;
}
inline bool same_row_order(Convention a, Convention b) { return has_rotary_pairs(a) == has_rotary_pairs(b); }

// What rotary pairs do to the rows of a parameter.
enum class Rows {
  kPlain,        // nothing
  kRotaryQuery,  // num_attention_heads heads, each permuted
  kRotaryKey,    // num_key_value_heads heads, each permuted
  kDropped,      // derived data that is not carried
};

// How a tensor of another convention is made of canonical parameters, its parts.
enum class Form {
  kSame,           // is the one part
  kQkvByGroup,     // rows of q, k and v: for each key-value head its query heads, the key, the value
  kSections,       // the parts, all of one shape, one after the other along dimension 0
  kStacked,        // the part of every expert, along a new first dimension
  kTransposed,     // [out, in] of the part's [in, out]
  kTransposedQkv,  // rows of each head's query, key and value, of [in, q | k | v]; of a bias the same without [in]
  kDropped,        // derived data that is not carried
};

// Which layers have a parameter.
enum class Layers {
  kAll,
  kDense,       // whose feed-forward part is one network
  kSparse,      // whose feed-forward part is experts (ModelConfig::is_sparse_layer)
  kPrediction,  // after the last, that predict further tokens (ModelConfig::num_prediction_layers)
};

// One parameter, or with "{}" the same one of every layer; a second "{}" stands for the expert.
struct NameRule {
  std::string_view hf;          // its canonical name
  std::string_view shape = {};  // formulas over the config, "vocab_size, hidden_size"; empty: derived data
  Rows rows = Rows::kPlain;
  int tp_dim = -1;              // the dimension tensor parallelism cuts; -1: every rank holds all of it
  std::string_view heads = {};  // the member that counts what must not be cut apart along it: "num_key_value_heads"
  Index sections = 1;           // equal parts fused along that dimension, each cut by itself
  enum class Place { kFirst, kLayer, kLast } place = Place::kLayer;  // in a pipeline
  Layers layers = Layers::kAll;
  std::string_view when = {};     // a formula that must not be 0, absent members being 0; "!name": that must be 0
  std::string_view tied_to = {};  // not stored where tie_word_embeddings is set: the same bytes as this one
  std::string_view dtype = {};    // where it is not the model's
  bool quantized = false;         // a matrix that FP8 models hold in blocks, scaled by a second tensor: scale_name()

  bool is_per_expert() const;
  // Whether its rows (dimension 0) are words.
  bool is_vocabulary() const { return shape.starts_with("vocab_size,"); }
};

// A tensor under a name of another convention. Where several have a part in common, the first is what is written, and
// the others are read as well.
struct StoredRule {
  std::string_view stored;  // with "{}" as in a NameRule
  Form form = Form::kSame;
  std::array<std::string_view, 3> parts = {};  // NameRule::hf, as many as the form has

  std::size_t part_count() const;
};

struct ConventionTable {
  Convention convention = Convention::kHf;
  std::span<const StoredRule> rules;
};

// A number that a config.json may leave out, and what it is then. What the file says is null stays without a value, and
// so does what cannot be computed.
struct ConfigDefault {
  std::string_view name;
  std::string_view formula;
};

struct Family {
  std::string_view name;                          // as in --family
  std::string_view title;                         // for people
  std::span<const std::string_view> model_types;  // of config.json
  std::span<const ConfigDefault> defaults;        // in this order
  std::span<const NameRule> rules;
  std::string_view optional_prefix = {};              // that Hugging Face names may have before them: "transformer."
  std::span<const ConventionTable> conventions = {};  // of the conventions other than Hugging Face's

  bool has_convention(Convention convention) const;
  bool knows_model_type(std::string_view model_type) const;
};

extern const Family kLlamaFamily, kMistralFamily, kQwen2Family, kQwen3Family, kQwen3MoeFamily, kMixtralFamily,
    kDeepseekV3Family, kGemma2Family, kGemma3Family, kGpt2Family, kBloomFamily;

// Every family there is. Where names fit several, the first of them.
std::span<const Family* const> families();
// Puts one before the others. Not thread-safe: for the start of the program, as family_file.h does it.
void add_family(const Family& family);
const Family* family_of_model_type(std::string_view model_type);  // null where there is none

// A parameter's name, understood.
struct ParsedName {
  const NameRule* rule = nullptr;      // of a tensor of several parts the first one's
  const StoredRule* stored = nullptr;  // where the name is not Hugging Face's
  Convention convention = Convention::kHf;
  Index layer = -1;
  Index expert = -1;
  bool is_scale = false;  // of the matrix that the rule is about

  // Whether the tensor is something else than one canonical parameter under another name.
  bool is_packed() const { return stored && stored->form != Form::kSame && stored->form != Form::kDropped; }
};
// Looks past "_orig_mod." anywhere, a leading "model." of torchtitan's older checkpoints, and the family's own prefix.
std::optional<ParsedName> parse_name(const Family& family, std::string_view parameter);
// A pattern with its numbers; those below 0 are left out.
std::string format_pattern(std::string_view pattern, Index layer, Index expert);
// The canonical name of a parameter that is not packed.
std::string canonical_name(const ParsedName& name);
// What a convention stores a canonical parameter as; null for Hugging Face's, and where it has none.
const StoredRule* stored_rule(const Family& family, const NameRule& rule, Convention convention);

// How tensor parallelism cuts a tensor; dim -1: not.
struct TensorParallelCut {
  int dim = -1;
  std::string_view heads = {};  // as in NameRule
  Index sections = 1;
};
TensorParallelCut tensor_parallel_cut(const ParsedName& name);

// What holds the scales of an FP8 matrix: "x.weight" -> "x.weight_scale_inv".
std::string scale_name(std::string_view matrix);

// The family that knows the most of a catalog's model tensors, and how they are named; nothing when none knows any.
// The config's model_type decides where it has one that is known.
struct Detected {
  const Family* family = nullptr;
  Convention convention = Convention::kHf;
};
std::optional<Detected> detect_family(const Catalog& catalog, const ModelConfig* config = nullptr);
// How a catalog names this family's parameters; nothing where it has none of them.
std::optional<Convention> detect_convention(const Family& family, const Catalog& catalog);

// A canonical key under another convention's name, a packed tensor's where it becomes part of one: parameters, and
// optimizer keys around them. Unknown ones unchanged.
std::string rename_key(const Family& family, std::string_view canonical_key, Convention convention);
// Any key under its canonical name; a packed tensor's unchanged.
std::string canonical_key(const Family& family, std::string_view key);
// A nested path whose elements held the flattened key `from`, for the key `to`.
KeyPath rename_path(const KeyPath& path, std::string_view from, std::string_view to);

// A parameter that a model has by its config.
struct Parameter {
  std::string name;  // canonical
  Dims shape;
  const NameRule* rule = nullptr;
  Index layer = -1;
  Index expert = -1;
  bool is_tied = false;   // shares its bytes with another, and need not be stored
  bool is_scale = false;  // holds the scales of an FP8 matrix, one for each block; the rule is the matrix's
  std::string dtype;      // "bfloat16": the rule's, a quantized model's, or the config's; may be empty
};
// All of them, layer by layer within each rule; an FP8 model's scales follow their matrices. Fails where the config
// lacks a number that a shape needs, and for models quantized in a way that is not known.
Result<std::vector<Parameter>> parameters(const Family& family, const ModelConfig& config);
// What a checkpoint may hold besides: the layers that predict further tokens. Mostly empty.
Result<std::vector<Parameter>> prediction_parameters(const Family& family, const ModelConfig& config);
// Their elements, tied ones counted once and scales not at all: what people mean by a model's size.
Index count_elements(const std::vector<Parameter>& parameters);

}  // namespace reshard
