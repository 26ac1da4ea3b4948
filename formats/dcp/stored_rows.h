// Boxes and their places, taken from a `.metadata` pickle while it is read: a checkpoint of 16,384 ranks has a million,
// which as values of the pickle would take five times the memory and the time.
//
//   chunks         ChunkStorageMetadata(offsets, sizes)                          a box of the tensor the list is of
//   storage_data   MetadataIndex(fqn, index, offset): _StorageInfo(path, ...)    where the box with that number lies
//
// It is all or nothing. Whatever is not as plain as torch writes it is no error here: MetadataReader then reads the
// same bytes without this, and tells what is wrong, if anything is.
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

class StoredRows : public pickle::RecordSink {
 public:
  // The boxes of one tensor, in the order of its chunks.
  struct Boxes {
    FragmentList fragments = FragmentList();
    std::vector<std::uint8_t> stored;  // whether storage_data told where fragment i lies
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

  // What was taken of the list `chunks` of the tensor `name`, once; nothing where that is not all of it.
  std::optional<Boxes> boxes_of(std::string_view name, const pickle::Value& chunks);
  // Whether the dict `storage` has all its entries from what was taken, and has all of that.
  bool is_all_of(const pickle::Value& storage) const;
  const std::vector<Item>& blobs() const { return blobs_; }
  // Paths that the extents' file numbers stand for, in the order they occur.
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
  // Of strings of the pickle: by their identity where they are used again, which spares hashing them.
  class Numbers {
   public:
    std::optional<std::size_t> find(const pickle::RecordField& text);
    // False where that text has a number.
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

  // The MetadataIndex whose _StorageInfo comes next.
  std::optional<std::size_t> tensor_;  // none: an object's
  std::size_t row_ = 0;
};

}  // namespace reshard::dcp
