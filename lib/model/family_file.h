// SPDX-License-Identifier: Apache-2.0
// Reads model families from JSON: the built-in ones (samples/families, compiled in) and the user's own:
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
// The members are those of NameRule, StoredRule and ConfigDefault (family.h); docs/adding.md describes each of them.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/result.h"
#include "lib/model/family.h"

namespace reshard {

// Parses a family strictly: unknown members, invalid formulas, and parts that are not parameters are errors that name
// path and member. A family may only extend a built-in one.
Result<Family> parse_family(std::string_view text, std::string_view path);

// Reads a family from a file, or a table of classes (Family::class_table). Equal texts give the same object, which
// lives as long as the process because configs and views point to it; but only calls to which it is passed (families.h)
// use it. Thread-safe.
Result<const Family*> load_family(const std::string& path);

// The built-in families as text, in the order in which names are matched.
struct BuiltinFamily {
  std::string_view name, text;
};
std::span<const BuiltinFamily> builtin_families();
// Returns the table of kept_dtypes.h as text.
std::string_view builtin_kept_dtypes();
// Returns the text of samples/families/parameter_order.json (parameter_order.h).
std::string_view builtin_parameter_order();
// Returns the table of transposed_weights.h as text.
std::string_view builtin_transposed();
// Returns whether the text of builtin_families()[i], or of a family that it extends, contains a word. Does not parse
// it.
bool mentions(std::size_t i, const std::string& word);
// Calls `look` with each family whose description mentions one of the words, in order, until it returns false; with all
// families if there are no words. Built-in descriptions are searched as text, so that others are not parsed.
void each_family(Families families, std::span<const std::string> words, const std::function<bool(const Family&)>& look);

// Returns the first components of the names, up to a number, such as "model." of "model.norm.weight" and "layer_" of
// "layer_0.mlp.linear". The JSON of a family that knows one of the names contains one of them, so they are words for
// each_family(). Returns nothing, and so all families have to be tried, if a name begins with a number or there are
// many.
std::vector<std::string> first_words(const NamePatterns& names);

// Returns builtin_families()[i], parsed at the first call. Lives as long as the process; thread-safe.
const Family* builtin_family(std::size_t i);
// Returns a family with around_text over the given text family: "llava+qwen2". Returns `outer` itself if `text` is the
// family it extends, and null if a name of `text` has none of the prefixes that `outer` replaces. Lives as long as the
// process; thread-safe.
const Family* family_over(const Family& outer, const Family& text);

}  // namespace reshard
