// SPDX-License-Identifier: Apache-2.0
// The model families that a call can use: the built-in ones, preceded by one that the user described in a file.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

struct Family;

// A value passed along with a call (ModelChoice, OpenOptions, ModelConfig), so that the user's family of one call is
// unknown to the next and to other threads. If names match several families, the first counts. The built-in families
// are loaded when an iteration reaches them, so a loop that ends early is cheap. Thread-safe.
class Families {
 public:
  class Iterator {
   public:
    Iterator(const Family* own, std::size_t at) : own_(own), at_(at) {}
    const Family* operator*() const;
    Iterator& operator++() { return ++at_, *this; }
    bool operator==(const Iterator&) const = default;

   private:
    const Family* own_;
    std::size_t at_;
  };

  Families() = default;
  // `own` is the user's family, which comes first; null for none. It must live as long as the process (load_family()).
  explicit Families(const Family* own) : own_(own) {}

  const Family* own() const { return own_; }
  std::string_view class_table() const;  // of the user's own classes (architecture.h); empty: none
  Iterator begin() const { return {own_, 0}; }
  Iterator end() const;

 private:
  const Family* own_ = nullptr;
};

std::vector<std::string> family_names(Families families = {});             // as in --family; loads no family
const Family* find_family(std::string_view name, Families families = {});  // null if there is none
// Returns the family for the model_types of config.json and its text_config, or null if there is none.
const Family* family_of_model_type(std::string_view model_type, std::string_view text_model_type = {},
                                   Families families = {});

}  // namespace reshard
