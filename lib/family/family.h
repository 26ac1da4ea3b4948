// Model families: what the parameters of a model are called in each convention, how their rows are ordered there, and
// how tensor parallelism cuts them. A family is a table; everything it does is a rewriting of catalogs that moves no
// data:
//
//   canonical view   a catalog under Hugging Face names, its rows in Hugging Face order. The fragments are the same
//                    bytes: a rotary permutation is a doubled row stride, a fused projection a cut at head borders.
//
// Source and target are both brought into the canonical view, and the plan is made there. The planner, the executor and
// the verifier never hear of models.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/state_key.h"
#include "lib/family/config.h"
#include "lib/layout/layout.h"

namespace reshard {

// Who named the parameters.
enum class Names {
  kHf,              // model.layers.0.self_attn.q_proj.weight
  kTorchtitan,      // layers.0.attention.wq.weight, output.weight: until April 2026
  kTorchtitan2026,  // layers.0.attention.qkv_linear.wq.weight, lm_head.weight
};
std::string_view names_title(Names names);
// Torchtitan keeps the rows of q and k as its rotary embedding wants them (pairs side by side), Hugging Face as its own
// (first halves, then second halves).
inline bool same_row_order(Names a, Names b) { return (a == Names::kHf) == (b == Names::kHf); }

// How the rows of a stored tensor follow from the canonical ones.
enum class Rows {
  kPlain,
  kRotaryQuery,  // num_attention_heads heads, each permuted
  kRotaryKey,    // num_key_value_heads heads, each permuted
  kFusedQkv,     // wq, wk and wv interleaved by key-value head; canonical: three tensors
  kDropped,      // derived data that the other convention does not store
};

// A size a config gives.
enum class Size { kNone, kVocab, kHidden, kIntermediate, kQuery, kKeyValue };

// One parameter, or with "{}" the same one of every layer.
struct NameRule {
  std::string_view hf;          // empty: has no Hugging Face name of its own
  std::string_view torchtitan;  // empty likewise
  std::string_view torchtitan_2026;
  Rows rows = Rows::kPlain;
  int tp_dim = -1;  // the dimension tensor parallelism cuts; -1: every rank holds all of it
  Size shape[2] = {Size::kNone, Size::kNone};
  enum class Place { kFirst, kLayer, kLast } place = Place::kLayer;  // in a pipeline
};

struct Family {
  std::string_view name;  // as in --family
  std::string_view title;
  std::string_view model_type;  // of config.json
  std::span<const NameRule> rules;
};

extern const Family kLlamaFamily;

// Every family there is.
std::span<const Family* const> families();

// A parameter's name, understood.
struct ParsedName {
  const NameRule* rule = nullptr;
  Names names = Names::kHf;
  Index layer = -1;
};
// Looks past "_orig_mod." anywhere and a leading "model." of torchtitan's older checkpoints.
std::optional<ParsedName> parse_name(const Family& family, std::string_view parameter);
std::string format_name(const NameRule& rule, Names names, Index layer);

// The family that knows the most of a catalog's model tensors, and how they are named; nothing when none knows any.
struct Detected {
  const Family* family = nullptr;
  Names names = Names::kHf;
};
std::optional<Detected> detect_family(const Catalog& catalog);

struct ViewOptions {
  const Family* family = nullptr;
  const ModelConfig* config = nullptr;  // may be null where `hf_rows` is false and nothing is fused
  bool hf_rows = true;                  // false: both sides of the job are torchtitan's, rows stay as they are
  bool keep_unknown = false;            // carry model tensors that no rule knows under their own names
};
// The canonical view of a catalog; optimizer state is renamed and permuted with its parameter. The tensors that take
// part must be located if rows are to change. A model tensor that no rule knows is an error that lists them all.
// `dropped` receives the names of tensors left out as derived data.
Result<Catalog> canonical_view(const Catalog& catalog, const ViewOptions& options, std::vector<std::string>* dropped);

// A canonical key under another convention's name: parameters, and optimizer keys around them. Unknown ones unchanged.
std::string rename_key(const Family& family, std::string_view canonical_key, Names names);
// Any key under its canonical name.
std::string canonical_key(const Family& family, std::string_view key);
// A nested path whose elements held the flattened key `from`, for the key `to`.
KeyPath rename_path(const KeyPath& path, std::string_view from, std::string_view to);

// The parameters of the model a config describes: canonical names and shapes, layer by layer within each rule.
std::vector<std::pair<std::string, Dims>> parameters(const Family& family, const ModelConfig& config);

// That the canonical view is the model the config describes: every parameter there, in its shape. Names the first
// tensors that are missing or differ. `complete` = false allows missing ones.
Status check_against_config(const Catalog& view, const Family& family, const ModelConfig& config, bool complete);

// ---- placement

// How tensors are to lie on a mesh: tensor parallelism by the family's rules (without a family, along the dimension the
// source itself was cut), FSDP on dimension 0 of what is left, pipeline stages by layer as torchtitan deals them out.
// Optimizer state follows its parameter.
class Placer {
 public:
  // A usage error where there are more pipeline stages than parts of the model.
  static Result<Placer> make(const Mesh& mesh, const Family* family, const ModelConfig* config, const Catalog& source);
  // A sentence on tensor parallelism that cuts through attention heads of a known config; mostly empty.
  const std::string& warning() const { return warning_; }
  Placement place(const Tensor& tensor) const;

 private:
  Placer(const Mesh& mesh, const Family* family) : mesh_(mesh), family_(family) {}
  int tp_dim(const Tensor& tensor, std::string_view parameter) const;
  Index stage(std::string_view parameter) const;

  Mesh mesh_;
  const Family* family_;
  Index layers_ = 0;
  std::string warning_;
  std::unordered_map<std::string, Dims> parameter_shapes_;
};

}  // namespace reshard
