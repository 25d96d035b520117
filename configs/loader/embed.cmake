# cmake -DINPUT=schema.bin -DOUTPUT=schema_source.cpp -P embed.cmake: writes a file as a C++ array.
file(READ ${INPUT} hex HEX)
string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
file(WRITE ${OUTPUT} "#include <cstddef>
namespace birkhoff {
extern const unsigned char kSchemaSource[];
extern const std::size_t kSchemaSourceBytes;
const unsigned char kSchemaSource[] = {\n${bytes}};
const std::size_t kSchemaSourceBytes = sizeof(kSchemaSource);
}  // namespace birkhoff
")
