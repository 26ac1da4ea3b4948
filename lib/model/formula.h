// SPDX-License-Identifier: Apache-2.0
// Formulas for sizes in the tables of model families: "num_key_value_heads*head_dim",
// "hidden_size/num_attention_heads". They are sums and differences of products of whole numbers and members of a
// config.json; "/" rounds down, ":" up, "^" raises the product before.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

// Returns the value of a name, or nothing if there is none.
using NumberOf = std::function<std::optional<Index>(std::string_view name)>;

// Evaluates a formula. Fails if a name has no value ("num_experts is not given"), on overflow, and on syntax errors.
Result<Index> evaluate(std::string_view formula, const NumberOf& number_of);

// Returns whether the formula is a single name.
bool is_single_name(std::string_view formula);

// Returns the formula in usual notation, for people: "(image_size/patch_size)^2+1", "ceil(width/8)".
std::string in_usual_notation(std::string_view formula);

// Returns the formula with its values, for people: "num_key_value_heads 8 x head_dim 128". Names without a value stay
// as they are.
std::string explain(std::string_view formula, const NumberOf& number_of);

}  // namespace reshard
