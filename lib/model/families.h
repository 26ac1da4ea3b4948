// The model families that a call knows: those of the program, and before them one that the user described in a file.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

struct Family;

// A value that travels with a call (ModelChoice, OpenOptions, ModelConfig), so that what one call is given is unknown
// to the next one and to those in other threads. Where names fit several families, the first counts. The program's own
// are each read when a loop reaches them, so a loop that ends early is short. Thread-safe.
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
  // With the user's own before the others; null: none. It lives as long as the process (load_family).
  explicit Families(const Family* own) : own_(own) {}

  const Family* own() const { return own_; }
  Iterator begin() const { return {own_, 0}; }
  Iterator end() const;

 private:
  const Family* own_ = nullptr;
};

std::vector<std::string> family_names(Families families = {});             // as in --family; reads no family
const Family* find_family(std::string_view name, Families families = {});  // null if there is none
// The family of what config.json and its text_config say; null if there is none.
const Family* family_of_model_type(std::string_view model_type, std::string_view text_model_type = {},
                                   Families families = {});

}  // namespace reshard
