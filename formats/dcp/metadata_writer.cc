#include <string_view>
#include <utility>
#include <variant>

#include "formats/dcp/metadata.h"
#include "formats/encoding/pickle_writer.h"

namespace reshard::dcp {
namespace {

constexpr Index kStretch = Index{1} << 20;  // bytes

void write_size(pickle::PickleWriter& w, const Dims& dims) {
  w.shared_global("torch", "Size");
  w.integers(dims.span());
  w.tuple_of_last(1);
  w.reduce();
}

// An object of a class without arguments, whose state is the dict that `fields` writes key by key.
template <class Fields>
void write_object(pickle::PickleWriter& w, std::string_view module, std::string_view name, Fields fields) {
  w.shared_global(module, name);
  w.empty_tuple();
  w.new_object();
  {
    const pickle::Dict state(w);
    fields();
  }
  w.build();
}

void write_properties(pickle::PickleWriter& w, DType dtype) {
  w.shared_global(kMetadataModule, "TensorProperties");
  w.empty_tuple();
  w.new_object();
  w.mark();
  w.shared_global("torch", info(dtype).torch_name);
  w.shared_global("torch.serialization", "_get_layout");
  w.shared_text("torch.strided");
  w.tuple_of_last(1);
  w.reduce();
  w.boolean(false);  // requires_grad
  w.shared_global(kMetadataModule, "_MEM_FORMAT_ENCODING");
  w.integer(0);  // contiguous
  w.tuple_of_last(1);
  w.reduce();
  w.boolean(false);  // pin_memory
  w.tuple_from_mark();
  w.build();
}

class Writer {
 public:
  Writer(const MetadataContents& contents, const std::function<Status(std::string_view)>& emit)
      : contents_(contents), emit_(emit) {}

  Status write() {
    write_object(w_, kMetadataModule, "Metadata", [&] {
      w_.shared_text("state_dict_metadata");
      each_entry([&](std::size_t e, const Entry& entry) {
        w_.shared_text(entry.name);
        if (entry.dtype) return write_tensor(e, entry);
        w_.shared_global(kMetadataModule, "BytesStorageMetadata");
        w_.empty_tuple();
        w_.new_object();
      });
      w_.shared_text("planner_data");
      each_entry([&](std::size_t, const Entry& entry) {
        w_.shared_text(entry.name);
        write_path(entry);
      });
      w_.shared_text("storage_data");
      write_storage();
    });
    TRY(std::move(status_));
    return emit_(std::move(w_).finish());
  }

 private:
  using Entry = MetadataContents::Entry;

  // A dict of all entries, each of which `write_one` writes, key and value.
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
    write_object(w_, kMetadataModule, "TensorStorageMetadata", [&] {
      w_.shared_text("properties");
      write_properties(w_, *entry.dtype);
      w_.shared_text("size");
      write_size(w_, entry.shape);
      w_.shared_text("chunks");
      w_.empty_list();
      pickle::ElementRuns chunks(w_, &pickle::PickleWriter::append_items);
      contents_.each_item(e, [&](const WrittenItem& item) {
        chunks.next();
        write_object(w_, kMetadataModule, "ChunkStorageMetadata", [&] {
          w_.shared_text("offsets");
          write_size(w_, item.box.origin);
          w_.shared_text("sizes");
          write_size(w_, item.box.shape);
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
        write_object(w_, kMetadataModule, "MetadataIndex", [&] {
          w_.shared_text("fqn");
          w_.shared_text(entry.name);
          w_.shared_text("index");
          if (!entry.dtype) return w_.none();
          w_.integer(i++);
          w_.shared_text("offset");
          write_size(w_, item.box.origin);
        });
        write_object(w_, kFilesystemModule, "_StorageInfo", [&] {
          w_.shared_text("relative_path");
          w_.shared_text(contents_.file(item.file));
          w_.shared_text("offset");
          w_.integer(item.offset);
          w_.shared_text("length");
          w_.integer(item.length);
        });
        hand_on();
      });
    }
    runs.end();
  }

  void write_path(const Entry& entry) {
    w_.mark();
    if (entry.path.empty()) w_.shared_text(entry.name);
    for (const auto& part : entry.path) {
      if (const auto* text = std::get_if<std::string>(&part))
        w_.shared_text(*text);
      else
        w_.integer(std::get<Index>(part));
    }
    w_.tuple_from_mark();
  }

  const MetadataContents& contents_;
  const std::function<Status(std::string_view)>& emit_;
  pickle::PickleWriter w_;
  Status status_;  // of what was handed on
};

}  // namespace

Status write_metadata(const MetadataContents& contents, const std::function<Status(std::string_view bytes)>& emit) {
  return Writer(contents, emit).write();
}

}  // namespace reshard::dcp
