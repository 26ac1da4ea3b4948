// Fuzzes pickles: parsing terminates, memory is proportional to the input, and the resulting tree can be walked and
// printed.
#include <cstddef>
#include <cstdint>
#include <string>

#include "formats/encoding/pickle.h"
#include "tests/fuzz/fuzz_target.h"

namespace reshard::pickle_fuzz {
namespace {

// Calls every accessor of a value and of its parts, down to some depth, because the tree may have cycles.
void visit(pickle::Value v, int depth, int& budget) {
  if (depth == 0 || --budget < 0) return;
  require(!pickle::kind_name(v.kind()).empty());
  require(v.as_int().has_value() == (v.kind() == pickle::Kind::kInt));
  require(v.as_float().has_value() == (v.kind() == pickle::Kind::kFloat));
  require(v.as_string().has_value() == (v.kind() == pickle::Kind::kString));
  require(v.as_bytes().has_value() == (v.kind() == pickle::Kind::kBytes));
  if (v.kind() == pickle::Kind::kBigInt) require(v.big_int_text().size() > 3);
  for (std::size_t i = 0; i < v.size(); ++i) {
    if (v.kind() == pickle::Kind::kDict) {
      visit(v.key(i), depth - 1, budget);
      visit(v.value(i), depth - 1, budget);
    } else {
      visit(v[i], depth - 1, budget);
    }
  }
  for (pickle::Value part : {v.callee(), v.args(), v.keywords(), v.state(), v.items(), v.persistent_id()})
    if (!part.is_none()) visit(part, depth - 1, budget);
}

}  // namespace

FUZZ_TARGET(pickle)(const std::uint8_t* data, std::size_t size) {
  const auto document = pickle::parse(std::string(reinterpret_cast<const char*>(data), size), "input");
  if (!document) {
    require(document.error().message().size() < 1000);
    return 0;
  }
  require(document->cells() <= 3 * static_cast<Index>(size) + 16);
  int budget = 10000;
  visit(document->root(), 8, budget);
  for (const std::string& name : document->globals()) require(name.find('.') != std::string::npos);
  require(pickle::print(document->root(), 64, 1000).size() < 20000);
  require(document->root().mismatch("fuzz", "nothing").code() == ErrorCode::kCorrupt);
  return 0;
}

}  // namespace reshard::pickle_fuzz
