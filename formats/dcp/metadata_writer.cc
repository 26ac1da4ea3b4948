// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "formats/dcp/dcp.h"
#include "formats/dcp/metadata.h"
#include "formats/encoding/pickle_writer.h"

namespace reshard::dcp {
namespace {

constexpr Index kStretch = Index{1} << 20;  // bytes

// A text or global that is written for each tensor or item: in full the first time, then as a reference.
struct MemoizedText {
  std::string_view text, module = {};  // the global's module; empty for a text
  std::optional<std::uint32_t> memo = {};
};

class Writer {
 public:
  Writer(const MetadataContents& contents, const std::function<Status(std::string_view)>& emit)
      : contents_(contents), emit_(emit), names_(contents.entries()) {}

  Status write() {
    MemoizedText metadata{"Metadata", kMetadataModule};
    write_object(metadata, [&] {
      w_.shared_text("state_dict_metadata");
      each_entry([&](std::size_t e, const Entry& entry) {
        w_.text(entry.name);  // used only by this entry
        names_[e] = w_.put();
        if (entry.dtype) return write_tensor(e, entry);
        w_.shared_global(kMetadataModule, "BytesStorageMetadata");
        w_.empty_tuple();
        w_.new_object();
      });
      w_.shared_text("planner_data");
      each_entry([&](std::size_t e, const Entry& entry) {
        w_.get(names_[e]);
        write_path(e, entry);
      });
      w_.shared_text("storage_data");
      write_storage();
    });
    TRY(std::move(status_));
    return emit_(std::move(w_).finish());
  }

 private:
  using Entry = MetadataContents::Entry;

  void write(MemoizedText& word) {
    if (word.memo) return w_.get(*word.memo);
    word.memo = word.module.empty() ? w_.shared_text(word.text) : w_.shared_global(word.module, word.text);
  }

  void write_size(const Dims& dims) {
    write(torch_size_);
    w_.integers(dims.span());
    w_.tuple_of_last(1);
    w_.reduce();
  }

  // Writes an object of a class without arguments. `fields` writes its state, a dict, key by key.
  template <class Fields>
  void write_object(MemoizedText& of, Fields fields) {
    write(of);
    w_.empty_tuple();
    w_.new_object();
    {
      const pickle::Dict state(w_);
      fields();
    }
    w_.build();
  }

  void write_properties(DType dtype) {
    write(tensor_properties_);
    w_.empty_tuple();
    w_.new_object();
    w_.mark();
    write(dtypes_.try_emplace(dtype, MemoizedText{info(dtype).torch_name, "torch"}).first->second);
    write(get_layout_);
    write(strided_);
    w_.tuple_of_last(1);
    w_.reduce();
    w_.boolean(false);  // requires_grad
    write(memory_format_);
    w_.integer(0);  // contiguous
    w_.tuple_of_last(1);
    w_.reduce();
    w_.boolean(false);  // pin_memory
    w_.tuple_from_mark();
    w_.build();
  }

  // Writes a dict of all entries. `write_one` writes the key and value of one.
  template <class WriteOne>
  void each_entry(WriteOne write_one) {
    w_.empty_dict();
    pickle::ElementRuns runs(w_, &pickle::PickleWriter::set_items);
    for (std::size_t e = 0; e < contents_.entries(); ++e) {
      runs.next();
      write_one(e, contents_.entry(e));
      hand_on();
    }
    runs.end();
  }

  void hand_on() {
    if (w_.held() < kStretch) return;
    const std::string bytes = w_.take();
    if (status_) status_ = emit_(bytes);
  }

  void write_tensor(std::size_t e, const Entry& entry) {
    write_object(tensor_metadata_, [&] {
      write(properties_);
      write_properties(*entry.dtype);
      write(size_);
      write_size(entry.shape);
      write(chunks_);
      w_.empty_list();
      pickle::ElementRuns chunks(w_, &pickle::PickleWriter::append_items);
      contents_.each_item(e, [&](const WrittenItem& item) {
        chunks.next();
        write_object(chunk_metadata_, [&] {
          write(offsets_);
          write_size(item.box.origin);
          write(sizes_);
          write_size(item.box.shape);
        });
        hand_on();
      });
      chunks.end();
    });
  }

  void write_storage() {
    w_.empty_dict();
    pickle::ElementRuns runs(w_, &pickle::PickleWriter::set_items);
    for (std::size_t e = 0; e < contents_.entries(); ++e) {
      const Entry entry = contents_.entry(e);
      contents_.each_item(e, [&, i = Index{0}](const WrittenItem& item) mutable {
        runs.next();
        write_object(metadata_index_, [&] {
          write(fqn_);
          w_.get(names_[e]);
          write(index_);
          if (!entry.dtype) return w_.none();
          w_.integer(i++);
          write(offset_);
          write_size(item.box.origin);
        });
        write_object(storage_info_, [&] {
          write(relative_path_);
          write(files_.try_emplace(item.file, MemoizedText{contents_.file(item.file)}).first->second);
          write(offset_);
          w_.integer(item.offset);
          write(length_);
          w_.integer(item.length);
        });
        hand_on();
      });
    }
    runs.end();
  }

  void write_path(std::size_t e, const Entry& entry) {
    w_.mark();
    if (entry.path.empty()) w_.get(names_[e]);
    for (const auto& part : entry.path) {
      const auto* const text = std::get_if<std::string>(&part);
      if (!text)
        w_.integer(std::get<Index>(part));
      else if (*text == entry.name)
        w_.get(names_[e]);
      else
        w_.shared_text(*text);
    }
    w_.tuple_from_mark();
  }

  const MetadataContents& contents_;
  const std::function<Status(std::string_view)>& emit_;
  pickle::PickleWriter w_;
  std::vector<std::uint32_t> names_;  // for each entry that was written, the argument for get()
  MemoizedText torch_size_{"Size", "torch"}, tensor_properties_{"TensorProperties", kMetadataModule},
      get_layout_{"_get_layout", "torch.serialization"}, strided_{"torch.strided"},
      memory_format_{"_MEM_FORMAT_ENCODING", kMetadataModule};
  MemoizedText tensor_metadata_{"TensorStorageMetadata", kMetadataModule}, properties_{"properties"}, size_{"size"},
      chunks_{"chunks"}, chunk_metadata_{"ChunkStorageMetadata", kMetadataModule}, offsets_{"offsets"}, sizes_{"sizes"};
  MemoizedText metadata_index_{"MetadataIndex", kMetadataModule}, fqn_{"fqn"}, index_{"index"}, offset_{"offset"};
  MemoizedText storage_info_{"_StorageInfo", kFilesystemModule}, relative_path_{"relative_path"}, length_{"length"};
  std::map<DType, MemoizedText> dtypes_;
  std::map<std::uint32_t, MemoizedText> files_;
  Status status_;  // the first error of `emit`
};

}  // namespace

Status write_metadata(const MetadataContents& contents, const std::function<Status(std::string_view bytes)>& emit) {
  return Writer(contents, emit).write();
}

}  // namespace reshard::dcp
