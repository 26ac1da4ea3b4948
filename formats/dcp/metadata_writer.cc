#include <string_view>
#include <utility>
#include <variant>

#include "formats/dcp/metadata.h"
#include "formats/encoding/pickle_writer.h"

namespace reshard::dcp {
namespace {

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
  w.empty_dict();
  w.mark();
  fields();
  w.set_items();
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

void write_tensor(pickle::PickleWriter& w, const WrittenEntry& entry) {
  write_object(w, kMetadataModule, "TensorStorageMetadata", [&] {
    w.shared_text("properties");
    write_properties(w, entry.tensor->dtype);
    w.shared_text("size");
    write_size(w, entry.tensor->shape);
    w.shared_text("chunks");
    w.empty_list();
    pickle::ElementRuns chunks(w, &pickle::PickleWriter::append_items);
    for (const WrittenItem& item : entry.items) {
      chunks.next();
      write_object(w, kMetadataModule, "ChunkStorageMetadata", [&] {
        w.shared_text("offsets");
        write_size(w, item.box.origin);
        w.shared_text("sizes");
        write_size(w, item.box.shape);
      });
    }
    chunks.end();
  });
}

void write_storage(pickle::PickleWriter& w, pickle::ElementRuns& runs, const WrittenEntry& entry,
                   const std::vector<std::string>& files) {
  for (std::size_t i = 0; i < entry.items.size(); ++i) {
    const WrittenItem& item = entry.items[i];
    runs.next();
    write_object(w, kMetadataModule, "MetadataIndex", [&] {
      w.shared_text("fqn");
      w.shared_text(entry.name);
      w.shared_text("index");
      if (!entry.tensor) return w.none();
      w.integer(static_cast<Index>(i));
      w.shared_text("offset");
      write_size(w, item.box.origin);
    });
    write_object(w, kFilesystemModule, "_StorageInfo", [&] {
      w.shared_text("relative_path");
      w.shared_text(files[item.file]);
      w.shared_text("offset");
      w.integer(item.offset);
      w.shared_text("length");
      w.integer(item.length);
    });
  }
}

void write_path(pickle::PickleWriter& w, const WrittenEntry& entry) {
  w.mark();
  if (entry.path.empty()) w.shared_text(entry.name);
  for (const auto& part : entry.path) {
    if (const auto* text = std::get_if<std::string>(&part))
      w.shared_text(*text);
    else
      w.integer(std::get<Index>(part));
  }
  w.tuple_from_mark();
}

}  // namespace

std::string write_metadata(const std::vector<WrittenEntry>& entries, const std::vector<std::string>& files) {
  pickle::PickleWriter w;
  write_object(w, kMetadataModule, "Metadata", [&] {
    w.shared_text("state_dict_metadata");
    w.empty_dict();
    pickle::ElementRuns metadata(w, &pickle::PickleWriter::set_items);
    for (const WrittenEntry& entry : entries) {
      metadata.next();
      w.shared_text(entry.name);
      if (entry.tensor) {
        write_tensor(w, entry);
      } else {
        w.shared_global(kMetadataModule, "BytesStorageMetadata");
        w.empty_tuple();
        w.new_object();
      }
    }
    metadata.end();
    w.shared_text("planner_data");
    w.empty_dict();
    pickle::ElementRuns paths(w, &pickle::PickleWriter::set_items);
    for (const WrittenEntry& entry : entries) {
      paths.next();
      w.shared_text(entry.name);
      write_path(w, entry);
    }
    paths.end();
    w.shared_text("storage_data");
    w.empty_dict();
    pickle::ElementRuns storage(w, &pickle::PickleWriter::set_items);
    for (const WrittenEntry& entry : entries) write_storage(w, storage, entry, files);
    storage.end();
  });
  return std::move(w).finish();
}

}  // namespace reshard::dcp
