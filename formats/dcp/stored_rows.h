// SPDX-License-Identifier: Apache-2.0
// Takes boxes and their extents from a `.metadata` pickle while it is parsed. A checkpoint of 16,384 ranks has a
// million of them; as values of the pickle they would take five times the memory and the time.
//
//   chunks         ChunkStorageMetadata(offsets, sizes)                          a box of the list's tensor
//   storage_data   MetadataIndex(fqn, index, offset): _StorageInfo(path, ...)    the extent of box `index`
//
// It takes all of them or none. Anything that torch would write differently is not an error here: MetadataReader then
// reads the same bytes without rows and says what is wrong, if anything is.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "formats/encoding/pickle_records.h"
#include "lib/checkpoint/catalog.h"

namespace reshard::dcp {

// The boxes and extents of one pickle.
class StoredRows : public pickle::RecordSink {
 public:
  // The boxes of one tensor, in the order of its chunks.
  struct Boxes {
    FragmentList fragments = FragmentList();
    std::vector<std::uint8_t> stored;  // for each fragment, whether storage_data has given its extent
    int rank = 0;
  };
  struct Item {
    std::string name;
    Extent extent;
  };

  std::span<const pickle::RecordClass> classes() const override;
  bool begin(std::size_t cls, std::uint32_t identity, const TextBelow& below) override;
  bool take(std::size_t cls, const pickle::RecordFields& fields) override;
  std::optional<Dims> size_of(std::size_t cls, std::size_t object, std::size_t field) const override;

  // Moves out the boxes taken from the list `chunks` of the tensor `name`. Returns nothing if they are not all of it,
  // and on a second call.
  std::optional<Boxes> boxes_of(std::string_view name, const pickle::Value& chunks);
  // Returns whether the entries of the dict `storage` are exactly those that were taken.
  bool is_all_of(const pickle::Value& storage) const;
  const std::vector<Item>& blobs() const { return blobs_; }
  // Returns the paths for the extents' file numbers.
  const std::vector<std::string>& files() const { return files_; }

 private:
  struct TensorRows {
    std::string name;
    std::size_t first_object = 0;
    Boxes boxes = {};
    bool is_taken = false;
  };
  struct Run {
    std::uint32_t identity = 0;
    std::size_t cls = 0;
    std::size_t tensor = 0;
    std::size_t objects = 0;
  };
  // Numbers of strings. A string that the pickle shares is found by its identity, which saves hashing it.
  class Numbers {
   public:
    std::optional<std::size_t> find(const pickle::RecordField& text);
    // Returns false if the text already has a number.
    bool add(std::string_view text, std::size_t number) { return by_text_.emplace(text, number).second; }

   private:
    struct TextHash {
      using is_transparent = void;
      std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
    };
    std::unordered_map<std::uint32_t, std::size_t> by_identity_;
    std::unordered_map<std::string, std::size_t, TextHash, std::equal_to<>> by_text_;
    std::uint32_t last_identity_ = 0;
    std::size_t last_ = 0;
  };

  bool take_chunk(const pickle::RecordFields& fields);
  bool take_index(const pickle::RecordFields& fields);
  bool take_info(const pickle::RecordFields& fields);
  const Run* run_of(const pickle::Value& value, std::size_t cls) const;

  std::vector<TensorRows> tensors_;
  BoxPool pool_;
  std::vector<Run> runs_;  // by identity
  std::vector<Item> blobs_;
  std::vector<std::string> files_;
  Numbers tensor_numbers_;
  Numbers file_numbers_;
  std::size_t chunks_ = 0;  // objects of each class
  std::size_t indices_ = 0;
  std::size_t infos_ = 0;
  std::array<std::size_t, 3> last_run_{};
  mutable std::size_t last_asked_ = 0;

  // The MetadataIndex of the next _StorageInfo.
  std::optional<std::size_t> tensor_;  // nothing if it is an object's
  std::size_t row_ = 0;
};

}  // namespace reshard::dcp
