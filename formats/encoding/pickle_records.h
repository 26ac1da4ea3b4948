// SPDX-License-Identifier: Apache-2.0
// A way to read a pickle with millions of small objects: objects of given classes go to a sink as they are read and are
// left out of the tree. Their fields must be integers, strings, None, empty lists or torch.Sizes.
//
//   68 2e 29 81 94 7d 94 28                        an object of the class in memo entry 2e, and its fields:
//   68 31 68 0b 4d f4 01 4b 00 86 94 85 94 52 94   'offsets': torch.Size((500, 0))
//   68 35 68 0b 4b fa 4b 40 86 94 85 94 52 94      'sizes': torch.Size((250, 64))
//   75 62                                          SETITEMS, BUILD
//
// The container that held them gets one object without a state for each run of appended elements. Its identity tells
// which run it stands for.
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

// A class whose objects the sink takes.
struct RecordClass {
  std::string_view module;
  std::string_view name;
  std::vector<std::string_view> fields;  // at most kMaxRecordFields; an object may lack some
  std::optional<std::size_t> value;      // set if objects are keys of a dict: the class of the dict's values
};

// The value of one field.
struct RecordField {
  enum class Kind : std::uint8_t { kAbsent, kNone, kInt, kText, kSize, kEmptyList };
  Kind kind = Kind::kAbsent;
  bool is_shared = false;  // the text came from the memo
  Index number = 0;
  std::string_view text;       // into the pickle
  std::uint32_t identity = 0;  // of a text: the identity() of its Value
  Dims size;
};
using RecordFields = std::array<RecordField, kMaxRecordFields>;

// The receiver of the objects. Reading fails if begin() or take() returns false.
class RecordSink {
 public:
  RecordSink() = default;
  RecordSink(const RecordSink&) = delete;
  RecordSink& operator=(const RecordSink&) = delete;
  virtual ~RecordSink() = default;

  virtual std::span<const RecordClass> classes() const = 0;
  // Begins a run of objects. `identity` is that of the object that represents the run. `below(n)` returns the string n
  // values below that object on the stack; 1 is the container.
  using TextBelow = std::function<std::optional<std::string_view>(std::uint32_t n)>;
  virtual bool begin(std::size_t cls, std::uint32_t identity, const TextBelow& below) = 0;
  // Takes an object of the run that its class began last.
  virtual bool take(std::size_t cls, const RecordFields& fields) = 0;
  // Returns a torch.Size that take() got before. `object` counts the objects of the class over all runs.
  virtual std::optional<Dims> size_of(std::size_t cls, std::size_t object, std::size_t field) const = 0;
};

// Reads a file's pickle as parse() does, but passes objects of the sink's classes to the sink. Reads the file in pieces
// and drops the bytes of such objects, so memory stays small. Fails with something else than kIo also if an object has
// fields of other types; the caller should then use parse(), which reads it or says what is wrong.
Result<Document> parse_records(const File& file, RecordSink& sink);

}  // namespace reshard::pickle
