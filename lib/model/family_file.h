// A model family as a JSON file: those that come with the program (samples/families, compiled in), and a user's own:
//
//   {"reshard_family": 1,
//    "name": "mymodel", "title": "My model", "model_types": ["mymodel"],
//    "extends": "llama", "without": ["*.bias"],
//    "defaults": [["num_key_value_heads", "num_attention_heads"]],
//    "parameters": [
//      {"name": "model.layers.{}.attn.q.weight", "shape": "num_attention_heads*head_dim, hidden_size",
//       "tp_dim": 0, "heads": "num_attention_heads"}, ...],
//    "names": {"megatron": [
//      {"stored": "decoder.layers.{}.self_attention.linear_qkv.weight", "form": "qkv_by_group",
//       "parts": ["model.layers.{}.attn.q.weight", ...]}, ...]}}
//
// Members are those of NameRule, StoredRule and ConfigDefault (family.h); docs/adding.md describes them one by one.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/result.h"
#include "lib/model/family.h"

namespace reshard {

// Reads a family strictly: members nobody knows, formulas that are none, parts that are no parameters are errors that
// name path and member. What it extends is one of the program's.
Result<Family> parse_family(std::string_view text, std::string_view path);

// Reads the same of a file. Equal texts give the same family, which lives as long as the process, as configs and views
// keep pointers to it; but only a call that is given it (families.h) knows it. Thread-safe.
Result<const Family*> load_family(const std::string& path);

// The families of the program as text, in the order in which names are held against them.
struct BuiltinFamily {
  std::string_view name, text;
};
std::span<const BuiltinFamily> builtin_families();
// The table of kept_dtypes.h, as text.
std::string_view builtin_kept_dtypes();
// That of builtin_families()[i], read at the first call. Lives as long as the process; thread-safe.
const Family* builtin_family(std::size_t i);
// A family with around_text, extending another one: "llava+qwen2". Itself where that is the one it extends; null where
// there is a name of the other that none of its own names would begin with. Lives as long as the process; thread-safe.
const Family* family_over(const Family& outer, const Family& text);

}  // namespace reshard
