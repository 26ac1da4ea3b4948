// SPDX-License-Identifier: Apache-2.0
#include "formats/orbax/key_values.h"

#include <algorithm>

#include "lib/base/memory_limit.h"
#include "lib/base/text.h"

namespace reshard::orbax {

Status KeyValues::ask_for(std::size_t bytes) {
  constexpr Index kAtATime = Index{16} << 20;
  unasked_ += bytes + sizeof(Entry);
  if (unasked_ < kAtATime) return {};
  unasked_ = 0;
  return may_take(2 * kAtATime,
                  [&] { return "the keys of a database, " + with_commas(std::ssize(entries_)) + " so far"; });
}

Status KeyValues::add(std::string_view key, const Extent& extent) {
  if (!entries_.empty() && this->key(entries_.size() - 1) >= key)
    return corrupt("key '" + printable(key) + "': expected keys in ascending order");
  if (std::ssize(entries_) == kMaxKeys)
    return unsupported("more than " + with_commas(kMaxKeys) + " keys in a database");
  if (keys_.size() + key.size() > kMaxKeyBytes)
    return unsupported("keys of more than " + human_bytes(kMaxKeyBytes) + " in a database");
  TRY(ask_for(key.size()));
  entries_.push_back({keys_.size(), static_cast<std::uint32_t>(key.size()), extent});
  keys_ += key;
  return {};
}

Status KeyValues::add_inline(std::string_view key, std::string_view value) {
  TRY(ask_for(value.size()));
  TRY(add(key, {kInline, std::ssize(inline_), std::ssize(value)}));
  inline_ += value;
  return {};
}

std::optional<std::size_t> KeyValues::find(std::string_view wanted) const {
  const auto at = std::lower_bound(entries_.begin(), entries_.end(), wanted, [&](const Entry& e, std::string_view k) {
    return std::string_view(keys_).substr(e.key, e.key_length) < k;
  });
  const std::size_t i = at - entries_.begin();
  if (at == entries_.end() || key(i) != wanted) return std::nullopt;
  return i;
}

}  // namespace reshard::orbax
