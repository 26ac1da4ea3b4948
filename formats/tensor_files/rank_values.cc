// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/rank_values.h"

#include <algorithm>

#include "formats/encoding/pickle_writer.h"

namespace reshard {

bool RankValues::add(std::uint32_t file, const KeyPath& its_path, pickle::Value value) {
  pickle::PickleWriter w;
  if (!pickle::write_value(w, value)) return false;
  std::string text = std::move(w).finish();
  path = its_path;
  auto known = std::find(pickles.begin(), pickles.end(), text);
  if (known == pickles.end()) known = pickles.insert(known, std::move(text));
  holders.emplace_back(file, static_cast<std::size_t>(known - pickles.begin()));
  return true;
}

}  // namespace reshard
