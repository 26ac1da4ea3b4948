// Objects that a pickle holds by the million, handed over while it is read: nothing of them becomes a value in the
// tree. They are of classes whose fields are integers, strings, None, empty lists and torch.Sizes.
//
//   68 2e 29 81 94 7d 94 28                        an object of the class that was remembered as 2e, its fields:
//   68 31 68 0b 4d f4 01 4b 00 86 94 85 94 52 94   'offsets': torch.Size((500, 0))
//   68 35 68 0b 4b fa 4b 40 86 94 85 94 52 94      'sizes': torch.Size((250, 64))
//   75 62                                          SETITEMS, BUILD
//
// In the containers that hold them, all objects that one run of appended elements consists of are one: an object
// without a state, whose identity tells which.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/encoding/pickle.h"
#include "lib/base/file.h"
#include "lib/layout/box.h"

namespace reshard::pickle {

inline constexpr std::size_t kMaxRecordFields = 4;

struct RecordClass {
  std::string_view module;
  std::string_view name;
  std::vector<std::string_view> fields;  // at most kMaxRecordFields; an object need not have all
  std::optional<std::size_t> value;      // objects are keys of a dict, and the class of what they stand for
};

struct RecordField {
  enum class Kind : std::uint8_t { kAbsent, kNone, kInt, kText, kSize, kEmptyList };
  Kind kind = Kind::kAbsent;
  bool is_shared = false;  // a text that was there before
  Index number = 0;
  std::string_view text;       // into the pickle
  std::uint32_t identity = 0;  // of a text: that of the Value it would be
  Dims size;
};
using RecordFields = std::array<RecordField, kMaxRecordFields>;

// Takes the objects. What returns false ends the reading with an error.
class RecordSink {
 public:
  RecordSink() = default;
  RecordSink(const RecordSink&) = delete;
  RecordSink& operator=(const RecordSink&) = delete;
  virtual ~RecordSink() = default;

  virtual std::span<const RecordClass> classes() const = 0;
  // A run of objects begins. `identity` is that of the value in its stead; `below(n)` is the string n values below it
  // on the stack: 1 would be the container.
  using TextBelow = std::function<std::optional<std::string_view>(std::uint32_t n)>;
  virtual bool begin(std::size_t cls, std::uint32_t identity, const TextBelow& below) = 0;
  // An object of the run that its class began last.
  virtual bool take(std::size_t cls, const RecordFields& fields) = 0;
  // A torch.Size among the fields of the class's object with that number, counted over all runs.
  virtual std::optional<Dims> size_of(std::size_t cls, std::size_t object, std::size_t field) const = 0;
};

// Reads a file's pickle as parse() does, but for the objects of the sink's classes. An error that is not the system's
// may mean no more than that one of them is not as simple as said above: parse() tells what is wrong, if anything is.
// The file is read while that goes on, and bytes that only told of such objects are not kept.
Result<Document> parse_records(const File& file, RecordSink& sink);

}  // namespace reshard::pickle
